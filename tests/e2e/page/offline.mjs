/** The page as an app: it opens without its server, asks the server first where there is one, and keeps no answers of APIs. */

import assert from "node:assert/strict";
import { createServer, request } from "node:http";
import { after } from "node:test";
import { URL_OF_SERVER, answers, scene, send, settled, soon } from "./harness.mjs";

/** What stands before the server: it can be taken away, and can give out other files. */
class Front {
  constructor() {
    this.files = new Map();
    this.sockets = new Set();
  }

  open(port = 0) {
    this.server = createServer((incoming, outgoing) => {
      const file = this.files.get(incoming.url);
      if (file) return outgoing.writeHead(file.status ?? 200, { "content-type": "text/javascript" }).end(file.body);
      const further = request(this.#target(incoming), (answer) => {
        outgoing.writeHead(answer.statusCode, answer.headers);
        answer.pipe(outgoing);
      });
      further.on("error", () => outgoing.destroy());
      return incoming.pipe(further);
    });
    this.server.on("connection", (socket) => { this.sockets.add(socket); socket.on("close", () => this.sockets.delete(socket)); socket.on("error", () => {}); });
    this.server.on("upgrade", (incoming, socket, head) => {
      const further = request(this.#target(incoming));
      further.on("upgrade", (answer, other, first) => {
        socket.write(`HTTP/1.1 101 Switching Protocols\r\n${answer.rawHeaders.map((each, i) => (i % 2 ? `${each}\r\n` : `${each}: `)).join("")}\r\n`);
        socket.write(first);
        other.on("error", () => socket.destroy());
        socket.on("close", () => other.destroy());
        socket.pipe(other).pipe(socket);
        other.unshift(head);
      });
      further.on("error", () => socket.destroy());
      further.end();
    });
    return new Promise((resolve) => { this.server.listen(port, "127.0.0.1", () => { this.port = this.server.address().port; resolve(); }); });
  }

  #target({ url, method, headers }) {
    const { host, origin, port } = new URL(URL_OF_SERVER);
    return { host: "127.0.0.1", port, path: url, method, headers: { ...headers, host, ...(headers.origin && { origin }) } };
  }

  close() {
    this.server.close();
    for (const each of this.sockets) each.destroy();
  }

  get url() { return `http://127.0.0.1:${this.port}/`; }
}

const front = new Front();
after(() => front.close());
await front.open();

const controlled = (page) => page.evaluate(async () => { await navigator.serviceWorker.ready; return caches.keys(); });
const kept = (page) => page.evaluate(async () => {
  const [name] = (await caches.keys()).slice(-1);
  return (await (await caches.open(name)).keys()).map(({ url }) => new URL(url).pathname).sort();
});

scene("without its server the page opens, shows the chats that are kept, and goes on when it is back", async (page) => {
  await send(page, "one");
  await settled(page);
  const before = await answers(page);
  await controlled(page);
  const paths = await kept(page);
  assert.ok(paths.includes("/") && paths.includes("/chat.js") && !paths.some((path) => path.startsWith("/v1") || path.startsWith("/api")), paths.join());

  const { port } = front;
  front.close();
  await page.reload();
  await page.locator(".sidebar .pick").first().click();
  await soon(async () => assert.deepEqual(await answers(page), before));
  await page.getByText("Connection lost.").waitFor();
  await page.goto(`${front.url}game24.html`);
  await page.getByRole("heading", { name: "Tree of thought: the game of 24" }).waitFor();
  await page.goBack();

  await front.open(port);
  await page.locator(".server[data-status=open]").waitFor();
  await send(page, "two");
  await settled(page);
  await soon(async () => assert.equal((await answers(page)).length, 2));
  assert.deepEqual(await kept(page), paths); // no answer of an API
  page.context().problems = page.context().problems.filter((each) => !/ERR_CONNECTION_REFUSED|ERR_FAILED|Failed to fetch/.test(each));
}, { alone: true, path: front.url, serviceWorkers: "allow" });

scene("what the server gives out now is shown at once, and an old tab keeps its parts", async (page) => {
  await send(page, "one");
  await settled(page);
  const [old] = await controlled(page);
  await page.reload(); // the first visit went past the worker
  await settled(page);
  const worker = await (await fetch(`${URL_OF_SERVER}/sw.js`)).text();
  front.files.set("/sw.js", { body: worker.replace(/ramify page [0-9a-f]{16}/, "ramify page newer") });
  const chunk = (await kept(page)).find((path) => /\/katex-/.test(path)); // not loaded so far
  front.files.set(chunk, { status: 404, body: "" }); // the newer page has no such part
  assert.ok(await page.evaluate((path) => import(path).then(() => true), chunk));
  const chat = await (await fetch(`${URL_OF_SERVER}/chat.js`)).text();
  front.files.set("/chat.js", { body: `globalThis.newer = true;${chat}` });
  await page.reload();
  assert.equal(await page.evaluate(() => globalThis.newer), true); // before the new worker has taken over
  await page.evaluate(() => navigator.serviceWorker.getRegistration().then((each) => each.update()));
  front.files.delete(chunk);
  await page.close(); // the last tab of the old version
  await soon(async () => {
    const other = await page.context().newPage();
    await other.goto(front.url);
    const names = await controlled(other);
    await other.close();
    assert.deepEqual(names, ["ramify page newer"]);
  });
  assert.notEqual(old, "ramify page newer");
  front.files.clear();
  page.context().problems = page.context().problems.filter((each) => !/404/.test(each));
}, { alone: true, path: front.url, serviceWorkers: "allow" });
