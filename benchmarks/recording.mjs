/**
 * What `recording.py` films: the chat page in Chromium.
 * node recording.mjs SCENE URL CHROMIUM FOLDER: pictures go to FOLDER; lines of output ask for what happens to the server.
 */

import { createInterface } from "node:readline";
import { chromium } from "../clients/web/page/node_modules/playwright-core/index.mjs";

const [name, url, executablePath, folder] = process.argv.slice(2);
const PICTURE_MS = 100;
const SCENES = {
  killed: { act: killed, viewport: { width: 900, height: 520 }, settings: { seed: 5 } },
  drafts: { act: drafts, viewport: { width: 900, height: 640 }, settings: { seed: 5, folded: true } },
  chat: { act: chat, viewport: { width: 1480, height: 780 }, settings: { seed: 5 } },
};
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

/** Have something done to the server, and wait until it is. */
async function ask(what) {
  process.stdout.write(`${what}\n`);
  await lines.next();
}

const { act, viewport, settings } = SCENES[name];
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const page = await browser.newPage({ viewport, colorScheme: "light" });
await page.addInitScript((kept) => { localStorage["ramify chat settings"] = JSON.stringify(kept); }, settings);
await page.goto(url);
await page.locator("#input").waitFor();

let pictures = 0;
const picture = () => page.screenshot({ path: `${folder}/${String(pictures++).padStart(4, "0")}-${Math.round(performance.now())}.png` });
let waiting = false; // no pictures: what a start takes is the machine's

/** Take pictures while something is done. */
async function filmed(action) {
  let filming = true;
  const film = (async () => {
    while (filming) {
      while (waiting) await pause(PICTURE_MS);
      const begin = performance.now();
      await picture();
      await pause(Math.max(0, PICTURE_MS - (performance.now() - begin)));
    }
  })();
  await action();
  filming = false;
  await film;
}

const written = (selector, least) => page.waitForFunction(
  ([where, length]) => document.querySelector(where)?.textContent.length >= length, [selector, least],
);
const settled = () => page.waitForFunction(() => !document.querySelector(".writing") && document.querySelector(".answer"), undefined, { timeout: 120_000 });

async function send(text) {
  await page.locator("#input").pressSequentially(text, { delay: 25 });
  await page.locator("#input").press("Enter");
}

const caption = (text) => page.evaluate((words) => {
  const box = document.getElementById("caption") ?? document.body.appendChild(Object.assign(document.createElement("div"), { id: "caption" }));
  box.style.cssText = "position:fixed;left:14px;bottom:76px;width:232px;box-sizing:border-box;z-index:9;padding:.6rem .8rem;border-radius:9px;background:#1d2433;color:#fff;font:600 15px system-ui";
  box.textContent = words;
  box.hidden = !words;
}, text);

/** A server dies in mid-sentence and comes back. */
async function killed() {
  await filmed(async () => {
    await pause(600);
    await send("Tell me a short story about a fox.");
    await written(".writing .text", 180);
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
    await settled();
    await pause(1800);
  });
}

/** Three answers to one question. */
async function drafts() {
  await page.locator("#count").selectOption("3");
  await filmed(async () => {
    await send("Tell me a story about an owl.");
    await settled();
    await pause(1800);
  });
}

/** A chat with versions, drafts that are being written, and the tree beside it: one picture. */
async function chat() {
  await send("What is 27 + 48?");
  await settled();
  await page.keyboard.press("Control+Shift+O");
  await send("Who are you?");
  await settled();
  await page.getByRole("button", { name: /^Retry/ }).click();
  await page.locator(".arrows").waitFor();
  await settled();
  await page.keyboard.press("Alt+T");
  await page.locator("#count").selectOption("3");
  await send("Tell me a story about an owl.");
  await page.waitForFunction(() => [...document.querySelectorAll(".writing .text")].filter((each) => each.textContent.length > 80).length === 3);
  await picture();
}

await act();
await browser.close();
process.exit(0); // standard input is still open
