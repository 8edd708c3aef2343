/**
 * The service worker: with it the page opens while its server cannot be reached, and shows the chats that the browser keeps.
 *
 * It answers for the page's own files alone, whose names and version the build puts in. All else, the APIs above all, goes
 * past it. The server is always asked first: what it gives out now is what is shown, so nothing old hides something new,
 * and another program at the same address is not hidden either. What is kept is one whole version of the files. A new
 * worker keeps a new one, and takes over when no tab of the old one is left, whose parts are still to be had until then.
 */

const KEPT = `ramify page ${VERSION}`;
const OURS = /^ramify page /;
const AWAY = [502, 503, 504]; // a proxy says: there is no server behind it
const paths = new Set(FILES);

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(KEPT).then((cache) => cache.addAll(FILES.map((path) => new Request(path, { cache: "no-cache" })))));
});

self.addEventListener("activate", (event) => {
  event.waitUntil(caches.keys().then((names) => Promise.all(names.filter((name) => OURS.test(name) && name !== KEPT).map((name) => caches.delete(name)))));
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const { origin, pathname } = new URL(request.url);
  if (request.method !== "GET" || origin !== location.origin || !paths.has(pathname)) return;
  event.respondWith(serverFirst(request, pathname));
});

/** What the server gives out; what is kept, where there is no answer or the server has a newer page without this part. */
async function serverFirst(request, pathname) {
  const kept = () => caches.open(KEPT).then((cache) => cache.match(pathname));
  try {
    const answer = await fetch(request);
    const away = AWAY.includes(answer.status) || (!answer.ok && request.mode !== "navigate");
    return away ? await kept() ?? answer : answer;
  } catch (error) {
    const found = await kept();
    if (found) return found;
    throw error;
  }
}
