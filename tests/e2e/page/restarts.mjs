/** The server restarts: `test_page.py` does it, asked by a line of output, and says so by a line of input. */

import assert from "node:assert/strict";
import { createInterface } from "node:readline";
import { again, answers, last, scene, send, settled, soon, streaming } from "./harness.mjs";

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** @param {"restart" | "forget"} how  "forget": with the store as it was at the restart before */
async function restart(how) {
  process.stdout.write(`\n${how} now\n`);
  await lines.next();
}

scene("an answer goes on over a restart, and what a restart has lost is told again", async (page) => {
  await page.getByText(/The server saves them too, for up to 6 h after their last use/).waitFor();
  await send(page, "one");
  await streaming(page);
  await restart("restart");
  await settled(page);
  const [text] = await answers(page);
  await soon(async () => assert.match(await page.locator(".stats").textContent(), /^300 tokens · went on after a restart of the server · \d+ of \d+ cached · token limit$/));
  await again(page);
  await soon(async () => assert.equal(await last(page), text));
  await soon(async () => assert.match(await page.locator(".stats").textContent(), /^300 tokens · \d+ tok.s · first after/));
  await page.getByRole("button", { name: "Earlier version" }).click();
  await send(page, "two");
  await settled(page);
  const before = await answers(page);
  await restart("forget"); // the retry and the second turn are not on the server now
  await page.locator(".server[data-status=open]").waitFor();
  await soon(async () => assert.deepEqual(await answers(page), before));
  await again(page);
  const told = await answers(page); // what was forgotten is on the server again: as text, and these bytes are none that a text has
  assert.deepEqual([told.length, told[0], told[1].length > 100], [2, before[0], true]);
  await again(page);
  await soon(async () => assert.deepEqual(await answers(page), told)); // the same context
  await send(page, "three");
  await settled(page);
  await soon(async () => assert.equal((await answers(page)).length, 3));
  await soon(async () => assert.equal(await page.locator(".failed, .notice:not(.mild)").count(), 0));
}, { settings: { max_tokens: 300 }, restarts: true });
process.stdin.unref?.();
