/** A second person with the link watches live, and can change nothing. */

import assert from "node:assert/strict";
import { answers, findings, last, scene, send, settled, soon, streaming, visit } from "./harness.mjs";

scene("who has the link sees answers as they are written", async (page) => {
  await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
  await send(page, "one");
  await settled(page);
  await page.getByRole("button", { name: "More for this chat" }).click();
  await page.getByRole("menuitem", { name: "Share: copy a link to watch live" }).click();
  await page.getByText("The link was copied").waitFor();
  const link = await page.evaluate(() => navigator.clipboard.readText());
  const key = await page.evaluate(() => location.hash);
  assert.ok(link.includes("#watch=") && !link.includes(key));

  const other = await visit({ path: link });
  await other.waitForFunction(() => document.querySelectorAll(".answer").length === 1);
  await soon(async () => assert.deepEqual(await answers(other), await answers(page)));
  await send(page, "two");
  await streaming(other, 30);
  await settled(page);
  await settled(other);
  await soon(async () => assert.deepEqual(await answers(other), await answers(page)));
  await soon(async () => assert.deepEqual(await other.locator(".bubble").allTextContents(), ["one", "two"]));

  await page.getByRole("button", { name: /^Retry/ }).last().click();
  await streaming(other, 30);
  await settled(page);
  await settled(other);
  await soon(async () => assert.deepEqual(await other.locator(".arrows > span").allTextContents(), ["2/2"]));
  await same(other, page);

  await send(page, "three");
  await streaming(other, 30);
  await other.reload(); // in mid-stream
  await settled(page);
  await settled(other);
  await same(other, page);
  await soon(async () => assert.equal(await other.locator("#input").count(), 0));
  await other.keyboard.press("Alt+t");
  assert.deepEqual(await findings(other), []);
  await other.setViewportSize({ width: 390, height: 800 });
  await other.evaluate(() => { document.documentElement.dataset.theme = "dark"; });
  await other.keyboard.press("Alt+t");
  assert.deepEqual(await findings(other), []);
  await soon(async () => assert.equal(await other.getByRole("button", { name: /^(Edit|Retry)/ }).count(), 0));
  assert.deepEqual(other.context().problems, []);
  await other.context().close();
}, { alone: true, settings: { max_tokens: 400 } });

/** Wait until both pages show the same last answer: a watcher is some frames behind. */
async function same(other, page) {
  for (let tries = 0; tries < 100 && (await last(other)) !== (await last(page)); tries++) {
    await page.waitForTimeout(100);
  }
  await soon(async () => assert.equal(await last(other), await last(page)));
}
