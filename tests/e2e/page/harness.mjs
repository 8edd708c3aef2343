/**
 * One Chromium for all scenes of a run, and a page with storage of its own for each scene. Scenes mostly wait, so some
 * are played side by side. The server's address is the first argument. See `run.mjs`, `test_page.py`.
 */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, describe, it } from "node:test";
import { fileURLToPath } from "node:url";
import { chromium } from "../../../clients/web/page/node_modules/playwright-core/index.mjs";

export const URL_OF_SERVER = process.argv[2];
const CHROMIUM = process.argv[3];
const QUIET = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
];
const PATIENCE_MS = 30_000;
const LONG_TASK_MS = 50;
const TRIES = 3;
const SIDE_BY_SIDE = 3;
const EXPECTED = /ERR_INTERNET_DISCONNECTED|^WebSocket connection to .* failed/;
const CUT_LOAD = /^Failed to load resource: net::ERR_CONNECTION_(RESET|REFUSED) \(.*\/(katex|common)-\w+\.js\)$/;
export const SETTINGS = { temperature: 0, max_tokens: 60 };

const browser = await chromium.launch({ executablePath: CHROMIUM, args: QUIET });
after(() => browser.close());

/**
 * A visit: a browser context, whose storage nobody shares. `problems`: what the page complained of.
 * `restarts`: the server does; the browser itself then says of a library that was just being loaded (the page loads it again) that it failed.
 */
export async function visit({ settings = {}, path = "/", restarts = false, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, reducedMotion: "reduce", serviceWorkers: "block", ...options });
  context.setDefaultTimeout(PATIENCE_MS);
  context.problems = [];
  context.on("page", (page) => {
    page.on("pageerror", (error) => context.problems.push(error.stack));
    page.on("console", (message) => {
      const said = `${message.text()} (${message.location().url})`;
      if (message.type() === "error" && !EXPECTED.test(said) && !(restarts && CUT_LOAD.test(said))) context.problems.push(said);
    });
  });
  const page = await context.newPage();
  await page.addInitScript(() => {
    globalThis.jumps = [];
    new PerformanceObserver((list) => { globalThis.jumps.push(...list.getEntries().filter((each) => !each.hadRecentInput)); }).observe({ type: "layout-shift", buffered: true });
  });
  await page.addInitScript((kept) => { localStorage["ramify chat settings"] ??= JSON.stringify(kept); }, { ...SETTINGS, ...settings });
  await page.goto(new URL(path, URL_OF_SERVER).href);
  await page.locator("main").waitFor();
  return page;
}

const scenes = [];

/** A test with a page of its own, which must not complain. `alone`: it shares something of the browser or the machine with others. */
export function scene(name, act, { alone = false, ...options } = {}) {
  scenes.push({ name, act, alone, options });
}

/** Play all scenes that were told of. */
export function play() {
  const told = (alone) => () => { for (const each of scenes) if (each.alone === alone) played(each); };
  describe("side by side", { concurrency: SIDE_BY_SIDE }, told(false));
  describe("alone", { concurrency: 1 }, told(true));
}

function played({ name, act, options }) {
  it(name, async () => {
    const page = await visit(options);
    try {
      await act(page);
      assert.deepEqual(page.context().problems, []);
    } catch (error) {
      console.log(page.context().problems.join("\n"));
      await page.screenshot({ path: `${process.env.SHOTS ?? "/tmp"}/failed.png` }).catch(() => {});
      throw error;
    } finally {
      await page.context().close();
    }
  });
}

/** Assert what comes to be: the page draws a moment after what it was told, later on a busy machine. */
export async function soon(check) {
  const until = Date.now() + PATIENCE_MS;
  for (;;) {
    try {
      return await check();
    } catch (error) {
      if (Date.now() > until) throw error;
    }
    await new Promise((resolve) => { setTimeout(resolve, 50); });
  }
}

export async function send(page, text, { count = 1 } = {}) {
  await page.locator("#count").selectOption(String(count));
  await page.locator("#input").fill(text);
  await page.locator("#input").press("Enter");
}

/** Wait until nothing is being written. */
export async function settled(page) {
  await page.waitForFunction(() => !document.querySelector(".writing") && document.querySelector(".answer"));
}

/** Wait until an answer has some text. */
export async function streaming(page, least = 20) {
  await page.waitForFunction((length) => document.querySelector(".writing .text")?.textContent.length >= length, least);
}

/**
 * The longest task of the page's main thread while something is done, in milliseconds of the thread's own time: what
 * other work of the machine takes is not in it.
 */
async function longestTask(page, action) {
  await browser.startTracing(page, { categories: ["toplevel", "devtools.timeline"] });
  await action();
  const { traceEvents } = JSON.parse((await browser.stopTracing()).toString());
  const threads = traceEvents.filter(({ name, args }) => name === "thread_name" && args.name === "CrRendererMain").map(({ pid, tid }) => `${pid} ${tid}`);
  const tasks = traceEvents.filter(({ name, ph, pid, tid }) => ph === "X" && name.endsWith("RunTask") && threads.includes(`${pid} ${tid}`));
  assert.ok(tasks.length > 10, "the trace shows no tasks");
  const longest = Math.max(...tasks.map(({ tdur, dur }) => tdur ?? dur)) / 1000;
  console.log(`longest task: ${longest} ms`);
  return longest;
}

/** Assert that no task is long. What the page itself needs long for is long in each try; what the machine is busy with is not. */
export async function withoutLongTasks(page, action) {
  let longest = Infinity;
  for (let i = 0; i < TRIES && longest > LONG_TASK_MS; i += 1) longest = Math.min(longest, await longestTask(page, action));
  assert.ok(longest <= LONG_TASK_MS, `a task of ${longest} ms in each of ${TRIES} tries`);
}

export const answers = (page) => page.locator(".answer .text").allTextContents();
export const last = async (page) => (await answers(page)).at(-1);

/** Retry, which at temperature 0 writes the same again: one more version, which may be written before anybody looks. */
export async function again(page) {
  const versions = page.locator(".arrows > span");
  const before = await versions.allTextContents();
  await page.getByRole("button", { name: /^Retry/ }).last().click();
  await soon(async () => assert.notDeepEqual(await versions.allTextContents(), before));
  await settled(page);
}

const axe = await readFile(fileURLToPath(new URL("../../../clients/web/page/node_modules/axe-core/axe.min.js", import.meta.url)), "utf8");

/** How far what was drawn has moved by itself since the page was loaded: the browser's measure, 0 where all stood still. */
export const jumped = (page) => page.evaluate(() => globalThis.jumps.reduce((sum, { value }) => sum + value, 0));

/** What axe finds wrong with what is shown. */
export async function findings(page) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html.slice(0, 160)).join(" | ")}`);
}
