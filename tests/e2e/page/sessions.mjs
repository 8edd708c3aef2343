/** A chat goes to another server as a file. */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { again, answers, last, scene, send, settled, soon, streaming, visit } from "./harness.mjs";

const arrows = (page) => page.locator(".arrows > span").allTextContents();

scene("a session goes into a file, and another one is made of it", async (page) => {
  const menu = async (name) => {
    await page.locator("header").getByRole("button", { name: "More for this chat" }).click();
    await page.getByRole("menuitem", { name }).click();
  };
  await send(page, "one");
  await settled(page);
  await again(page);
  await send(page, "two");
  await settled(page);
  await again(page);
  await page.keyboard.press("Control+,");
  await page.getByLabel("Maximum length").fill("400"); // from here on it matters what happens while an answer is written
  await page.getByRole("button", { name: "Done" }).click();
  await page.locator(".message.user").last().hover();
  await page.getByRole("button", { name: /^Edit/ }).last().click();
  await page.getByLabel("Edit your message").fill("a secret");
  await page.getByLabel("Edit your message").press("Enter");
  await streaming(page);
  await menu("Export session");
  await page.getByText(/Export the session when it is complete/).waitFor();
  await settled(page);
  await page.keyboard.press("Alt+T");
  await page.getByRole("treeitem").filter({ hasText: "a secret" }).click();
  await page.keyboard.press("Delete");
  await page.keyboard.press("Alt+T");
  await page.waitForFunction(() => [...document.querySelectorAll(".bubble")].at(-1).textContent === "two");
  const before = await answers(page);
  const versions = await arrows(page);
  const [download] = await Promise.all([page.waitForEvent("download"), menu("Export session")]);
  assert.equal(download.suggestedFilename(), "one.session");
  const buffer = await readFile(await download.path());
  assert.ok(!buffer.includes("a secret")); // what was deleted stays here

  const other = await visit({ settings: { max_tokens: 400 } });
  const open = (bytes) => other.getByLabel("Session file to open").setInputFiles({ name: "one.session", mimeType: "application/octet-stream", buffer: bytes });
  await open(Buffer.from("no session"));
  await other.getByText(/cannot be imported/).waitFor();
  await open(buffer);
  await other.getByText("goes on here").waitFor();
  await soon(async () => assert.deepEqual(await answers(other), before));
  await soon(async () => assert.deepEqual(await other.locator(".bubble").allTextContents(), ["one", "two"]));
  await soon(async () => assert.deepEqual(await arrows(other), versions));
  await other.reload();
  await settled(other);
  await soon(async () => assert.deepEqual(await answers(other), before));
  for (const each of [other, page]) {
    await send(each, "three");
    await streaming(each);
    await settled(each);
  }
  await soon(async () => assert.deepEqual(await answers(other), await answers(page))); // from the same context
  await again(other);
  await soon(async () => assert.equal(await last(other), await last(page)));
  assert.deepEqual(other.context().problems, []);
  await other.context().close();
}, { settings: { max_tokens: 40 } });
