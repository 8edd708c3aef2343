/** What stands around chats: language, the list that folds, keys. */

import assert from "node:assert/strict";
import { findings, scene, send, settled, soon } from "./harness.mjs";

scene("the page speaks the browser's language, or the one that is set", async (page) => {
  await page.getByRole("heading", { name: "Was möchtest du fragen?" }).waitFor();
  assert.equal(await page.evaluate(() => document.documentElement.lang), "de");
  await send(page, "one");
  await settled(page);
  await soon(async () => assert.match(await page.locator(".stats").textContent(), /^60 Tokens · .* · Maximallänge$/));
  await page.keyboard.press("Control+,");
  assert.deepEqual(await findings(page), []);
  await page.getByLabel("English").check();
  await page.getByRole("button", { name: "Done" }).click();
  await soon(async () => assert.match(await page.locator(".stats").textContent(), /^60 tokens · .* · token limit$/));
  await page.reload();
  await page.getByPlaceholder("Send a message").waitFor();
  assert.equal(await page.evaluate(() => document.documentElement.lang), "en");
}, { locale: "de-AT" });

scene("the list of chats folds away, and stays so", async (page) => {
  const list = page.getByRole("complementary", { name: "Chats" });
  await list.waitFor();
  await page.getByRole("button", { name: /^Hide the list of chats/ }).click();
  await list.waitFor({ state: "hidden" });
  assert.deepEqual(await findings(page), []);
  await page.reload();
  await page.getByRole("button", { name: /^Show the list of chats/ }).waitFor();
  assert.equal(await list.isVisible(), false);
  await page.setViewportSize({ width: 390, height: 800 }); // there it is a drawer
  await page.getByRole("button", { name: "Chats", exact: true }).click();
  await list.waitFor();
  await page.keyboard.press("Escape");
  await list.waitFor({ state: "hidden" });
  await page.setViewportSize({ width: 1280, height: 800 });
  await page.keyboard.press("Control+b");
  await list.waitFor();
});

scene("a key lists the keys", async (page) => {
  await page.locator(".log").focus();
  await page.keyboard.press("?");
  await page.getByRole("dialog", { name: "Keyboard shortcuts" }).waitFor();
  await soon(async () => assert.ok(await page.locator(".keys dt").count() > 12));
  assert.deepEqual(await findings(page), []);
  await page.keyboard.press("Escape");
  await page.getByRole("dialog").waitFor({ state: "hidden" });
});
