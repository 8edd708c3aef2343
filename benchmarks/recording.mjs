/**
 * What `recording.py` films: the chat page in Chromium, while the server dies and comes back.
 * node recording.mjs URL CHROMIUM FOLDER: pictures go to FOLDER; lines of output ask for what happens to the server.
 */

import { createInterface } from "node:readline";
import { chromium } from "../clients/web/page/node_modules/playwright-core/index.mjs";

const [url, executablePath, folder] = process.argv.slice(2);
const QUESTION = "Tell me a short story about a fox.";
const PICTURE_MS = 200;
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

/** Have something done to the server, and wait until it is. */
async function ask(what) {
  process.stdout.write(`${what}\n`);
  await lines.next();
}

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const page = await browser.newPage({ viewport: { width: 900, height: 520 }, colorScheme: "light" });
await page.addInitScript(() => { localStorage["ramify chat settings"] = JSON.stringify({ seed: 5 }); });
await page.goto(url);
await page.locator("#input").waitFor();

let filming = true;
let waiting = false; // no pictures: what a start takes is the machine's
const film = (async () => {
  for (let i = 0; filming; i += 1) {
    while (waiting) await pause(PICTURE_MS);
    const begin = performance.now();
    await page.screenshot({ path: `${folder}/${String(i).padStart(4, "0")}-${Math.round(begin)}.png` });
    await pause(Math.max(0, PICTURE_MS - (performance.now() - begin)));
  }
})();

const caption = (text) => page.evaluate((words) => {
  const box = document.getElementById("caption") ?? document.body.appendChild(Object.assign(document.createElement("div"), { id: "caption" }));
  box.style.cssText = "position:fixed;left:14px;bottom:76px;width:232px;box-sizing:border-box;z-index:9;padding:.6rem .8rem;border-radius:9px;background:#1d2433;color:#fff;font:600 15px system-ui";
  box.textContent = words;
  box.hidden = !words;
}, text);

await pause(600);
await page.locator("#input").pressSequentially(QUESTION, { delay: 25 });
await page.locator("#input").press("Enter");
await page.waitForFunction(() => document.querySelector(".writing .text")?.textContent.length >= 180);
await ask("kill");
await caption("kill -9: the server is dead");
await pause(1800);
await caption("the server starts again (shortened)");
await pause(2 * PICTURE_MS);
waiting = true;
await ask("start");
await page.locator(".server[data-status=open]").waitFor({ timeout: 120_000 });
await caption("the answer goes on in mid-sentence");
waiting = false;
await page.waitForFunction(() => !document.querySelector(".writing") && document.querySelector(".answer"), undefined, { timeout: 120_000 });
await pause(1800);
filming = false;
await film;
await browser.close();
process.exit(0); // standard input is still open
