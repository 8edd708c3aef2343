/** What a person did stays: edits, retries, refreshes, lost connections, lost sessions, tabs, files. */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { URL_OF_SERVER, again, answers, last, scene, send, settled, soon, streaming, visit } from "./harness.mjs";

const arrows = (page) => page.locator(".arrows > span").allTextContents();

scene("edit and retry make versions, and what followed stays behind the arrows", async (page) => {
  await send(page, "one");
  await settled(page);
  await send(page, "two");
  await settled(page);
  const before = await answers(page);
  assert.equal(before.length, 2);

  await page.locator(".message.user").first().hover();
  await page.getByRole("button", { name: /^Edit/ }).first().click();
  await page.getByLabel("Edit your message").fill("uno");
  await page.getByLabel("Edit your message").press("Enter");
  await settled(page);
  await soon(async () => assert.equal((await answers(page)).length, 1));
  await soon(async () => assert.deepEqual(await arrows(page), ["2/2"]));

  await page.getByRole("button", { name: "Earlier version" }).click();
  await soon(async () => assert.deepEqual(await answers(page), before));
  await soon(async () => assert.deepEqual(await page.locator(".bubble").allTextContents(), ["one", "two"]));

  await again(page);
  await soon(async () => assert.deepEqual(await arrows(page), ["1/2", "2/2"]));
  await soon(async () => assert.equal(await last(page), before[1]));
  await page.reload();
  await settled(page);
  await soon(async () => assert.deepEqual(await arrows(page), ["1/2", "2/2"]));
  await page.getByRole("button", { name: "Later version" }).first().click();
  await soon(async () => assert.deepEqual(await page.locator(".bubble").allTextContents(), ["uno"]));
});

scene("the answer's format belongs to its chat, and the button says so", async (page) => {
  const button = page.locator(".composer .format");
  await send(page, "one");
  await settled(page);
  await button.click();
  await page.getByRole("button", { name: "Use the example" }).click();
  await page.getByRole("button", { name: "Done" }).click();
  await page.waitForFunction(() => document.querySelector(".composer .format").textContent.includes("JSON"));
  await page.getByRole("button", { name: /^New chat/ }).first().click();
  await page.waitForFunction(() => document.querySelector(".composer .format").textContent === "");
});

scene("an answer is edited as a version beside it, and the first message's edit keeps the chat's name", async (page) => {
  await send(page, "one");
  await settled(page);
  const before = await last(page);
  await page.getByRole("button", { name: "More", exact: true }).last().click();
  await page.getByRole("menuitem", { name: "Edit this answer" }).click();
  await page.getByLabel("Edit this answer").fill("My own words.");
  await page.getByRole("button", { name: "Keep as my version" }).click();
  await page.waitForFunction(() => document.querySelector(".answer .text")?.textContent.trim() === "My own words.");
  assert.deepEqual(await arrows(page), ["2/2"]);
  await page.getByRole("button", { name: "Earlier version" }).click();
  assert.equal(await last(page), before);
  await page.locator(".message.user").first().hover();
  await page.getByRole("button", { name: /^Edit: makes/ }).first().click();
  await page.getByLabel("Edit your message").fill("uno");
  await page.getByLabel("Edit your message").press("Enter");
  await page.waitForFunction(() => document.querySelector(".bubble")?.textContent === "uno");
  assert.equal(await page.locator("h1.title").textContent(), "one");
});

scene("a refresh in mid-stream loses nothing", async (page) => {
  await send(page, "Go on");
  await streaming(page);
  await page.reload();
  await settled(page);
  const [text] = await answers(page);
  await again(page);
  await soon(async () => assert.equal(await last(page), text));
  await soon(async () => assert.match(await page.locator(".stats").last().textContent(), /400 tokens/));
}, { settings: { max_tokens: 400 } });

scene("ten seconds without network in mid-stream lose nothing, and it goes on at once", async (page) => {
  await page.clock.install();
  await send(page, "Go on");
  await streaming(page);
  await page.context().setOffline(true);
  await page.getByText(/No network/).first().waitFor();
  await page.waitForTimeout(300); // what had come is drawn
  const before = (await last(page)).length;
  await page.clock.fastForward(10_000); // by the page's clock
  await page.waitForTimeout(300);
  await soon(async () => assert.equal((await last(page)).length, before));
  const began = Date.now();
  await page.context().setOffline(false);
  await page.locator(".server[data-status=open]").waitFor();
  const took = Date.now() - began;
  assert.ok(took < 5_000, `back after ${took} ms`); // nothing waits for a timer
  await settled(page);
  const [text] = await answers(page);
  await again(page);
  await soon(async () => assert.equal(await last(page), text));
}, { settings: { max_tokens: 300 } });

scene("stop keeps what was written, and it can go on", async (page) => {
  await send(page, "Go on");
  await streaming(page);
  await page.locator("#input").press("Escape");
  await settled(page);
  const [short] = await answers(page);
  await soon(async () => assert.match(await page.locator(".stats").textContent(), /stopped/));
  await page.getByRole("button", { name: "Go on writing" }).click();
  await page.waitForFunction((length) => document.querySelector(".answer .text").textContent.length > length + 20, short.length);
  await page.locator("#input").press("Escape");
  await settled(page);
  await soon(async () => assert.ok((await last(page)).startsWith(short.slice(0, 20))));
}, { settings: { max_tokens: 2000 } });

scene("a session that the server has lost is built again from the text", async (page) => {
  await send(page, "one");
  await settled(page);
  const [first] = await answers(page);
  const sessions = await page.evaluate(keptSessions);
  await page.context().setOffline(true);
  await page.getByText(/No network/).first().waitFor();
  const other = await visit();
  await other.evaluate(endSessions, sessions);
  await other.context().close();
  await page.context().setOffline(false);
  await page.getByText(/no longer had this chat/).waitFor();
  await soon(async () => assert.deepEqual(await answers(page), [first]));
  await send(page, "two");
  await settled(page);
  await soon(async () => assert.equal((await answers(page)).length, 2));
  await again(page);
  const both = await answers(page);
  await page.getByRole("button", { name: "Earlier version" }).click();
  await soon(async () => assert.deepEqual(await answers(page), both)); // the same context gives the same answer
});

/** The sessions that this browser has kept. */
async function keptSessions() {
  const db = await new Promise((resolve) => { const asked = indexedDB.open("ramify"); asked.onsuccess = () => resolve(asked.result); });
  const chats = await new Promise((resolve) => { const asked = db.transaction("chats").objectStore("chats").getAll(); asked.onsuccess = () => resolve(asked.result); });
  db.close();
  return chats.map(({ session, key }) => ({ session, key }));
}

scene("a chat that was deleted is gone from the server too", async (page) => {
  await send(page, "not for long");
  await settled(page);
  const [login] = await page.evaluate(keptSessions);
  assert.equal(await page.evaluate(answerToOpen, login), "state");
  await page.evaluate(() => { // ten seconds to undo it may be short for what follows
    const { setTimeout: real } = globalThis;
    globalThis.setTimeout = (act, ms, ...rest) => real(act, ms === 10_000 ? 1e6 : ms, ...rest);
  });
  await page.locator("header").getByRole("button", { name: "More for this chat" }).click();
  await page.getByRole("menuitem", { name: "Delete" }).click();
  await page.getByRole("button", { name: "Undo" }).waitFor();
  const other = await page.context().newPage();
  await other.goto(URL_OF_SERVER);
  await send(other, "beside it");
  await settled(other);
  assert.equal(await page.evaluate(answerToOpen, login), "state"); // it can still be had back
  await other.close();
  await page.addInitScript(failOnce);
  await page.reload(); // and now it cannot
  await soon(async () => assert.equal(await page.evaluate(answerToOpen, login), "no_session"));
  await page.waitForFunction(`(${keptSessions})().then((kept) => kept.every(({ key }) => key !== "${login.key}"))`, null, { polling: 100 });
});

scene("a chat that is deleted while the server is away is ended when it is back", async (page) => {
  await send(page, "not for long");
  await settled(page);
  const [login] = await page.evaluate(keptSessions);
  await page.locator("header").getByRole("button", { name: "More for this chat" }).click();
  await page.getByRole("menuitem", { name: "Delete" }).click();
  await page.getByRole("button", { name: "Undo" }).waitFor();
  await page.addInitScript(() => { // this once no socket comes through
    if (sessionStorage.tried) return;
    sessionStorage.tried = "1";
    const { WebSocket: Real } = globalThis;
    globalThis.WebSocket = class extends Real { constructor(url, protocols) { super(url.replace(/:\d+/, ":9"), protocols); } };
  });
  await page.reload();
  await page.waitForFunction(`(${keptSessions})().then(([kept]) => kept)`, null, { polling: 100 });
  await page.reload();
  await page.waitForFunction(`(${keptSessions})().then((kept) => !kept.length)`, null, { polling: 100 });
  await soon(async () => assert.equal(await page.evaluate(answerToOpen, login), "no_session"));
  await soon(async () => assert.equal(await page.locator(".sidebar .pick").count(), 0));
});

/** The browser's store refuses the first write after a reload. */
function failOnce() {
  const real = IDBDatabase.prototype.transaction;
  IDBDatabase.prototype.transaction = function transaction(stores, mode) {
    if (mode !== "readwrite") return real.call(this, stores, mode);
    IDBDatabase.prototype.transaction = real;
    throw new Error("the store refuses to write");
  };
}

/** What the server says to one who comes back to a session: "state", an error's code, or "closed" where it says nothing. */
function answerToOpen({ session, key }) {
  return new Promise((resolve) => {
    const socket = new WebSocket(`ws://${location.host}/v1/ws`, ["ramify.v1+json"]);
    socket.onopen = () => socket.send(JSON.stringify({ type: "open", client: "looks", session, key }));
    socket.onmessage = ({ data }) => {
      const [message] = [JSON.parse(data)].flat();
      resolve(message.code ?? message.type);
      socket.close();
    };
    socket.onclose = () => resolve("closed"); // a busy server may refuse a socket: who asks, asks anew
  });
}

async function endSessions(sessions) {
  for (const { session, key } of sessions) {
    await new Promise((resolve) => {
      const socket = new WebSocket(`ws://${location.host}/v1/ws`, ["ramify.v1+json"]);
      socket.onopen = () => socket.send(JSON.stringify([{ type: "open", session, key }, { type: "close", id: 1 }]));
      socket.onclose = resolve;
    });
  }
}

scene("chats are a list: search, rename, delete, undo, and another tab has them too", async (page) => {
  await send(page, "about cats");
  await settled(page);
  await page.getByRole("button", { name: /^New chat/ }).first().click();
  await send(page, "about dogs");
  await settled(page);
  const list = page.locator(".sidebar .pick");
  await page.waitForFunction(() => document.querySelectorAll(".sidebar .pick").length === 2);
  await soon(async () => assert.deepEqual(await list.allTextContents(), ["about dogs", "about cats"]));

  await page.getByRole("searchbox").fill("CATS");
  await page.waitForFunction(() => document.querySelectorAll(".sidebar .pick").length === 1);
  await page.getByRole("searchbox").fill("");
  await page.getByRole("button", { name: "More for about cats" }).click();
  await page.getByRole("menuitem", { name: "Rename" }).click();
  await page.locator(".rename").fill("Felines");
  await page.locator(".rename").press("Enter");
  await page.getByRole("button", { name: "Felines", exact: true }).click();
  await page.waitForFunction(() => document.querySelector(".bubble")?.textContent === "about cats");

  const other = await page.context().newPage();
  await other.goto(URL_OF_SERVER);
  await other.getByRole("button", { name: "Felines", exact: true }).click();
  await settled(other);
  await page.getByText(/open in another tab/).waitFor();
  await send(other, "and lions");
  await settled(other);
  await page.getByRole("button", { name: "Use it here" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".bubble").length === 2);
  await other.close();

  await page.locator("header").getByRole("button", { name: "More for this chat" }).click();
  await page.getByRole("menuitem", { name: "Delete" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".sidebar .pick").length === 1);
  await page.getByRole("button", { name: "Undo" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".bubble").length === 2);
});

scene("a chat goes into a file and back", async (page) => {
  await send(page, "Keep **this**");
  await settled(page);
  await again(page);
  await page.locator("header").getByRole("button", { name: "More for this chat" }).click();
  await page.getByRole("menuitem", { name: "Rename" }).click();
  await page.getByLabel("Title of this chat").fill("Keep? this one.");
  await page.getByLabel("Title of this chat").press("Enter");
  const before = await answers(page);
  const saved = async (name) => {
    await page.locator("header").getByRole("button", { name: "More for this chat" }).click();
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("menuitem", { name }).click()]);
    assert.match(download.suggestedFilename(), /^Keep +this one\.(md|json)$/);
    return readFile(await download.path(), "utf8");
  };
  assert.match(await saved("Export as Markdown"), /## You\n\nKeep \*\*this\*\*\n\n## Answer/);
  const json = await saved("Export as JSON");
  assert.ok(!/"key"|"session"/.test(json)); // a file may be given away
  const file = (text) => ({ name: "chat.json", mimeType: "application/json", buffer: Buffer.from(text) });
  await page.getByLabel("File to import").setInputFiles(file(json));
  await page.getByText(/was imported/).waitFor();
  await soon(async () => assert.deepEqual(await answers(page), before));
  await soon(async () => assert.deepEqual(await arrows(page), ["2/2"]));
  await send(page, "and more");
  await settled(page);
  await soon(async () => assert.equal((await answers(page)).length, 2));
  await page.getByLabel("File to import").setInputFiles(file('{"format": "ramify chats 1", "chats": [{"messages": [{"role": "user"}]}]}'));
  await page.getByText(/message 1 has no text/).waitFor();
});
