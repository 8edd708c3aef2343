/** What stands around chats: language, the list that folds, keys. */

import assert from "node:assert/strict";
import { findings, jumped, scene, send, settled, soon } from "./harness.mjs";

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

scene("a model that thinks can be asked how much, and what is left empty shows what holds", async (page) => {
  const frames = [];
  page.on("websocket", (socket) => socket.on("framesent", ({ payload }) => frames.push(...[JSON.parse(payload)].flat())));
  await page.route("**/v1/info", async (route) => {
    const info = await (await route.fetch()).json();
    info.model.thinking = { told: false, efforts: { none: { tokens: 0, part: 0 }, low: { tokens: 1024, part: 0.25 } } };
    await route.fulfill({ json: info });
  });
  assert.equal(await page.locator("#effort").count(), 0); // what the server itself says
  await page.reload();
  const last = () => frames.findLast(({ type }) => type === "generate");
  await page.locator("#effort").selectOption("low");
  await send(page, "one");
  await settled(page);
  assert.equal(last().thought_tokens, 15); // a quarter of 60
  await page.locator("#effort").selectOption("none");
  await send(page, "two");
  await settled(page);
  assert.equal(last().thought_tokens, 0);
  await page.locator("#effort").selectOption("");
  await send(page, "three");
  await settled(page);
  assert.equal(last().thought_tokens, undefined);
  assert.deepEqual(await findings(page), []);
  await page.setViewportSize({ width: 360, height: 740 });
  await page.locator("#effort").selectOption("low");
  const { x, width } = await page.getByRole("button", { name: "Send" }).boundingBox();
  assert.ok(x + width < 360, "there is room for the button");
  await page.keyboard.press("Control+,");
  await soon(async () => assert.equal(await page.getByLabel("Top k").getAttribute("placeholder"), "0"));
  assert.equal(await page.getByLabel("Temperature").inputValue(), "0");
  assert.equal(await page.getByLabel("Maximum length").getAttribute("placeholder"), "1024");
});

scene("a model whose template tells it how much to think is told when a chat opens", async (page) => {
  const opened = [];
  page.on("websocket", (socket) => socket.on("framesent", ({ payload }) => opened.push(...[JSON.parse(payload)].flat().filter(({ type }) => type === "open"))));
  await page.route("**/v1/info", async (route) => {
    const info = await (await route.fetch()).json();
    info.model.thinking = { told: true, efforts: { low: { tokens: 1024, part: 0.25 }, high: { tokens: 16384, part: 0.75 } } };
    await route.fulfill({ json: info });
  });
  await page.reload();
  await page.locator("#input").pressSequentially("o"); // connects
  await soon(async () => assert.equal(opened.at(-1)?.effort, undefined));
  await page.locator("#effort").selectOption("high");
  await soon(async () => assert.equal(opened.at(-1)?.effort, "high"));
  await send(page, "one");
  await settled(page);
  assert.equal(await page.locator("#effort").isDisabled(), true);
  assert.equal(opened.at(-1).effort, "high");
});

scene("nothing jumps while the page loads", async (page) => {
  for (const viewport of [{ width: 1280, height: 800 }, { width: 390, height: 800 }]) {
    await page.setViewportSize(viewport);
    await page.reload();
    await page.locator(".examples").waitFor();
    await soon(async () => assert.match(await page.locator(".welcome p").textContent(), /context/));
    assert.ok(await jumped(page) < 0.001, `${await jumped(page)} at ${viewport.width}`);
  }
  await send(page, "one");
  await settled(page);
  await page.reload();
  await settled(page);
  await page.locator(".server[data-status=open]").waitFor({ state: "attached" });
  assert.ok(await jumped(page) < 0.01, `${await jumped(page)} with a chat`);
}, { settings: { max_tokens: 20 } });

scene("a chat can have settings of its own", async (page) => {
  const asked = [];
  page.on("websocket", (socket) => socket.on("framesent", ({ payload }) => asked.push(...[JSON.parse(payload)].flat().filter(({ type }) => type === "generate"))));
  await page.reload();
  await page.keyboard.press("Control+,");
  await page.getByLabel("Top k").fill("7");
  await page.getByRole("radio", { name: "This chat" }).check();
  assert.equal(await page.getByLabel("Top k").getAttribute("placeholder"), "7"); // what holds
  await page.getByLabel("Top k").fill("3");
  assert.deepEqual(await findings(page), []);
  await page.getByRole("button", { name: "Done" }).click();
  await send(page, "one");
  await settled(page);
  assert.equal(asked.at(-1).top_k, 3);
  await page.keyboard.press("Control+Shift+O");
  await send(page, "two");
  await settled(page);
  assert.equal(asked.at(-1).top_k, 7);
  await page.getByRole("button", { name: "one", exact: true }).click();
  await page.getByRole("heading", { name: "one", exact: true }).waitFor();
  await page.keyboard.press("Control+,");
  assert.equal(await page.getByLabel("Top k").inputValue(), "3"); // it opens where the chat has its own
  await page.getByLabel("Top k").fill("");
  await page.getByRole("button", { name: "Done" }).click();
  await send(page, "three");
  await settled(page);
  assert.equal(asked.at(-1).top_k, 7);
});

scene("menus of answers open where there is room", async (page) => {
  const within = async () => {
    const [menu, log] = await Promise.all([page.getByRole("menu").boundingBox(), page.locator(".log").boundingBox()]);
    assert.ok(menu.x >= log.x && menu.y >= log.y && menu.y + menu.height <= log.y + log.height, JSON.stringify([menu, log]));
  };
  for (const text of ["one", "two", "three"]) {
    await send(page, text);
    await settled(page);
    await page.getByRole("button", { name: "More", exact: true }).last().click();
    await within();
    await page.keyboard.press("Escape");
  }
}, { viewport: { width: 1000, height: 800 } });
