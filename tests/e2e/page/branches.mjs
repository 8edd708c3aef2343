/** Branches: drafts side by side, keep, merge, judge; the tree and its keys; the palette; nobody is shut out. */

import assert from "node:assert/strict";
import { fileURLToPath } from "node:url";
import { answers, findings, last, scene, send, settled, soon, streaming, withoutLongTasks } from "./harness.mjs";

scene("drafts stream side by side; one is kept, the others stay", async (page) => {
  await send(page, "A draft", { count: 3 });
  await page.waitForFunction(() => document.querySelectorAll(".draft.x, .draft").length === 3);
  await page.waitForFunction(() => [...document.querySelectorAll(".draft .writing .text")].filter((each) => each.textContent.length > 10).length === 3);
  await settled(page);
  const texts = await answers(page);
  await page.getByRole("button", { name: "Keep this" }).nth(1).click();
  await soon(async () => assert.deepEqual(await answers(page), [texts[1]]));
  await soon(async () => assert.deepEqual(await page.locator(".arrows > span").allTextContents(), ["2/3"]));
  await send(page, "Go on");
  await settled(page);
  await soon(async () => assert.equal((await answers(page)).length, 2));
  await page.getByRole("button", { name: "Later version" }).click();
  await soon(async () => assert.deepEqual(await answers(page), [texts[2]]));
}, { settings: { temperature: 1, seed: 1, max_tokens: 240 } }); // long enough to be seen streaming by a page that lags

scene("drafts are merged by the server, and the result is answered", async (page) => {
  await send(page, "A draft", { count: 2 });
  await settled(page);
  const texts = await answers(page);
  await page.getByRole("button", { name: "Merge all" }).click();
  await page.locator(".bubble.merged").waitFor();
  await settled(page);
  const merged = await page.locator(".bubble.merged p").textContent();
  assert.ok(merged.startsWith("Here are drafts"));
  await soon(async () => assert.equal((await answers(page)).length, 1));
  await soon(async () => assert.ok(!texts.includes(await last(page))));
  await page.reload();
  await settled(page);
  await soon(async () => assert.equal(await page.locator(".bubble.merged p").textContent(), merged));
}, { settings: { temperature: 1, seed: 1, max_tokens: 20 } });

scene("the model judges drafts", async (page) => {
  await send(page, "A draft", { count: 3 });
  await settled(page);
  await page.getByRole("button", { name: "Let the model judge" }).click();
  await page.locator(".draft.best").waitFor();
  const marks = await page.locator(".score").allTextContents();
  assert.equal(marks.length, 3);
  const numbers = marks.map((each) => Number.parseFloat(each));
  const best = await page.locator(".draft.best .score").textContent();
  assert.equal(Number.parseFloat(best), Math.max(...numbers));
}, { settings: { temperature: 1, seed: 1, max_tokens: 20 } });

scene("the tree shows every branch and is walked with keys", async (page) => {
  await send(page, "one", { count: 2 });
  await settled(page);
  await page.getByRole("button", { name: "Keep this" }).first().click();
  await send(page, "two");
  await settled(page);
  const first = await answers(page);
  await page.keyboard.press("Alt+t");
  const rows = page.getByRole("treeitem");
  await soon(async () => assert.equal(await rows.count(), 5));
  await soon(async () => assert.match(await page.locator(".totals").textContent(), /2 branches · \d+ tokens written · \d+ % of all prompts/));
  await soon(async () => assert.match(await page.locator(".kept").textContent(), /KV of up to [1-9]\d* tokens on the server · kept 6 h after you leave · (not )?saved/));
  await rows.last().click(); // the second draft
  await soon(async () => assert.equal((await answers(page)).length, 1));
  await page.keyboard.press("Home");
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await soon(async () => assert.deepEqual(await answers(page), first));
  await page.keyboard.press("Delete");
  await page.getByText("The branch was deleted.").waitFor();
  await soon(async () => assert.equal((await answers(page)).length, 1));
  await page.getByRole("button", { name: "Undo" }).click();
  await soon(async () => assert.deepEqual(await answers(page), first));
}, { settings: { temperature: 1, seed: 1, max_tokens: 20 } });

scene("eight branches stream without long tasks", async (page) => {
  await page.keyboard.press("Alt+t");
  await withoutLongTasks(page, async () => {
    await send(page, "Eight", { count: 8 });
    await streaming(page, 100);
    await settled(page);
  });
}, { alone: true, settings: { temperature: 1, max_tokens: 300 } });

scene("the palette finds commands and chats", async (page) => {
  await send(page, "about foxes");
  await settled(page);
  await page.keyboard.press("Control+k");
  await page.waitForFunction(() => document.activeElement?.closest(".palette"));
  await page.keyboard.type("dark");
  await page.waitForFunction(() => document.querySelectorAll(".palette [role=option]").length === 1);
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.documentElement.dataset.theme === "dark");
  await page.keyboard.press("Control+Shift+o");
  await page.waitForFunction(() => !document.querySelector(".message"));
  await page.keyboard.press("Control+k");
  await page.waitForFunction(() => document.activeElement?.closest(".palette"));
  await page.keyboard.type("foxes");
  await page.waitForFunction(() => document.querySelectorAll(".palette [role=option]").length === 1);
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector(".bubble")?.textContent === "about foxes");
}, { settings: { max_tokens: 10 } });

scene("nobody is shut out: axe finds nothing, on any screen", async (page) => {
  assert.deepEqual(await findings(page), []);
  await send(page, "one", { count: 2 });
  await settled(page);
  await page.keyboard.press("Alt+t");
  assert.deepEqual(await findings(page), []);
  await page.keyboard.press("Control+,");
  assert.deepEqual(await findings(page), []);
  await page.getByRole("button", { name: "Done" }).click();
  await page.keyboard.press("Control+k");
  assert.deepEqual(await findings(page), []);
  await page.keyboard.press("Escape");
  await page.evaluate(() => { document.documentElement.dataset.theme = "dark"; });
  assert.deepEqual(await findings(page), []);
  await page.setViewportSize({ width: 390, height: 800 });
  await page.keyboard.press("Alt+t");
  assert.deepEqual(await findings(page), []);
  await soon(async () => assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth)));
}, { settings: { max_tokens: 20 } });

scene("a tree of thought: the whole search is one frame, and every branch streams", async (page) => {
  const frames = [];
  page.on("websocket", (socket) => socket.on("framesent", ({ payload }) => frames.push(JSON.parse(payload))));
  await page.goto(page.url().replace(/\/[^/]*$/, "/game24.html"));
  await page.getByRole("button", { name: "Think" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".thought-card.writing").length === 5);
  await page.waitForFunction(() => document.querySelector(".facts")?.textContent.includes("in all"));
  await soon(async () => assert.equal(await page.locator(".thought-card").count(), 1 + 5 + 10 + 10));
  await soon(async () => assert.equal(await page.locator(".thought-card.kept").count(), 6));
  assert.match(await page.getByRole("status").textContent(), /^The search is done\. (A|No) branch makes 24\.$/);
  assert.ok((await page.getByRole("status").boundingBox()).width > 100, "the result is for those who see, too");
  assert.deepEqual(await findings(page), []);
  const card = page.locator(".thought-card.kept").first();
  assert.ok((await card.getAttribute("title")).startsWith(`${await card.locator("span").first().textContent()}\n`));
  const sent = frames.flat().filter(({ type }) => type !== "open" && type !== "ping" && type !== "close");
  assert.equal(frames.filter((frame) => Array.isArray(frame)).length, 1);
  assert.equal(sent.filter(({ type }) => type === "prune").length, 3);
  assert.deepEqual(await findings(page), []);
});

scene("what is typed is computed ahead, rolled back on a change, and sent as it is", async (page) => {
  await send(page, "First of all, a message that is long enough to be measured.");
  await settled(page);
  const box = page.locator("#input");
  await box.fill("The second one");
  const exact = () => page.waitForFunction(() => /\+ \d+/.test(document.querySelector(".counter").textContent));
  await exact();
  await box.fill("The second one is another");
  await page.waitForFunction(() => /\+ ~/.test(document.querySelector(".counter").textContent) || true);
  await page.waitForTimeout(600);
  await exact();
  await box.press("Enter");
  await settled(page);
  await soon(async () => assert.match(await page.locator(".stats").last().textContent(), /\d+ tokens were computed while you typed/));
  const text = await last(page);
  const [, computed] = /(\d+) of (\d+) cached/.exec(await page.locator(".stats").last().textContent()).slice(1).map(Number);
  assert.ok(computed > 0);
  await page.getByRole("button", { name: /^Retry/ }).last().click();
  await page.waitForFunction(() => document.querySelectorAll(".arrows").length === 1);
  await settled(page);
  await soon(async () => assert.equal(await last(page), text));
  await box.fill("thrown away");
  await exact();
  await box.fill("");
  await send(page, "The third one");
  await settled(page);
  await soon(async () => assert.equal((await answers(page)).length, 3));
}, { settings: { ahead: true, max_tokens: 20 } });

scene("pictures are pasted, dropped or chosen, seen, and kept with the chat", async (page) => {
  const icon = fileURLToPath(new URL("../../../clients/web/page/src/icon-192.png", import.meta.url));
  const asked = [];
  page.on("websocket", (socket) => socket.on("framesent", ({ payload }) => asked.push(...[JSON.parse(payload)].flat().filter(({ images }) => images))));
  await page.reload();
  await page.getByLabel("Take or choose a picture").last().setInputFiles(icon);
  await page.evaluate(async () => { // larger than a frame: it is brought to a size
    const canvas = new OffscreenCanvas(2400, 1200);
    const context = canvas.getContext("2d");
    for (let i = 0; i < 4000; i += 1) {
      context.fillStyle = `hsl(${(i * 47) % 360} 80% 50%)`;
      context.fillRect((i * 61) % 2400, (i * 37) % 1200, 40, 20);
    }
    const data = new DataTransfer();
    data.items.add(new File([await canvas.convertToBlob()], "large.png", { type: "image/png" }));
    document.querySelector("#input").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
    const other = new DataTransfer();
    other.items.add(new File(["no picture"], "wrong.png", { type: "image/png" }));
    document.querySelector("form.composer").dispatchEvent(new DragEvent("drop", { dataTransfer: other, bubbles: true, cancelable: true }));
  });
  await page.getByText(/“wrong.png” is no picture/).waitFor();
  await page.getByAltText("Picture: large.png").waitFor();
  await page.getByLabel("Files to attach").setInputFiles(icon);
  await soon(async () => assert.equal(await page.locator(".attached img").count(), 3));
  await page.getByRole("button", { name: "Remove icon-192.png" }).first().click();
  await send(page, "What do you see?");
  await settled(page);
  const names = () => page.locator(".picture img").evaluateAll((all) => all.map(({ alt, naturalWidth }) => [alt, naturalWidth]));
  const shown = await names();
  assert.deepEqual([shown[0][0], shown[1]], ["Picture: large.png", ["Picture: icon-192.png", 192]]);
  assert.deepEqual(asked.map(({ images, messages }) => [images.length, messages.at(-1).content]), [[2, "\ufffc\ufffcWhat do you see?"]]);
  assert.ok(asked[0].images.every((each) => each.length < 1 << 18));
  assert.deepEqual(await findings(page), []);
  await page.getByRole("button", { name: "Picture: icon-192.png" }).press("Enter");
  assert.equal(await page.locator(".picture[aria-expanded=true]").count(), 1);
  await page.reload();
  await settled(page);
  await soon(async () => assert.deepEqual(await names(), shown));
  await page.locator(".message.user").first().hover();
  await page.getByRole("button", { name: /^Edit/ }).first().click();
  await page.getByLabel("Edit your message").fill("And now?");
  await page.getByLabel("Edit your message").press("Enter");
  await settled(page);
  await soon(async () => assert.deepEqual(await names(), shown));
  await soon(async () => assert.deepEqual(asked.map(({ messages }) => messages.at(-1).content.slice(2)), ["What do you see?", "And now?"]));
  assert.equal(await page.locator(".failed, .notice:not(.mild)").count(), 0);
});
