/** Answers in a format: the schema, the form that an answer fills in, its check, and corrections. */

import assert from "node:assert/strict";
import { findings, scene, send, settled, soon } from "./harness.mjs";

/** Choose the format of answers. */
async function format(page, schema) {
  await page.getByRole("button", { name: /^Answer format/ }).click();
  await page.getByRole("textbox", { name: "JSON schema" }).fill(JSON.stringify(schema));
  await page.getByRole("button", { name: "Done" }).click();
}

scene("answers in a format, with a file attached", async (page) => {
  await page.getByRole("button", { name: "Answer format" }).click();
  await page.getByRole("textbox", { name: "JSON schema" }).fill("{");
  await page.getByText(/This is no JSON/).waitFor();
  await page.getByRole("textbox", { name: "JSON schema" }).fill(JSON.stringify({ type: "object", properties: { n: { enum: [1, 2] } }, required: ["n"] }));
  await page.getByRole("button", { name: "Done" }).click();
  await page.getByLabel("Files to attach").setInputFiles({ name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("three ``` ticks") });
  await page.getByLabel("Files to attach").setInputFiles({ name: "picture.png", mimeType: "image/png", buffer: Buffer.from([0x89, 0, 0xff]) });
  await page.getByText(/sees no pictures: “picture.png”/).waitFor();
  await page.getByLabel("Files to attach").setInputFiles({ name: "noise.bin", mimeType: "application/octet-stream", buffer: Buffer.from([0x89, 0, 0xff]) });
  await page.getByText(/is no text file/).waitFor();
  await send(page, "How many?");
  await settled(page);
  await soon(async () => assert.ok([1, 2].includes((await shown(page)).n)));
  await page.getByText(/^Valid:/).waitFor();
  await soon(async () => assert.equal(await page.locator(".file summary").textContent(), "notes.txt 15 characters"));
});

/** The value that is shown as JSON. */
async function shown(page) {
  await page.waitForFunction(() => /\S/.test(document.querySelector(".answer pre")?.textContent ?? ""));
  return JSON.parse(await page.locator(".answer pre").first().textContent());
}

const CARD = {
  type: "object", additionalProperties: false, required: ["title", "stars", "kind", "seen", "author", "tags"],
  $defs: { tag: { type: "string", minLength: 1, maxLength: 6 } },
  properties: {
    title: { type: "string", maxLength: 12, description: "What it is called" },
    stars: { type: "integer", minimum: 1, maximum: 5 },
    kind: { enum: ["book", "film", null] },
    seen: { type: "boolean" },
    author: { type: "object", additionalProperties: false, required: ["name"], properties: { name: { type: "string", maxLength: 8 }, born: { type: "integer", minimum: 0, maximum: 9 } } },
    tags: { type: "array", items: { $ref: "#/$defs/tag" }, minItems: 1, maxItems: 3 },
    note: { anyOf: [{ type: "null" }, { type: "string", maxLength: 5 }] },
  },
};

/** The texts of all that is in the chat's session on the server. */
async function told() {
  const db = await new Promise((resolve) => { const asked = indexedDB.open("ramify"); asked.onsuccess = () => resolve(asked.result); });
  const [{ session, key }] = await new Promise((resolve) => { const asked = db.transaction("chats").objectStore("chats").getAll(); asked.onsuccess = () => resolve(asked.result); });
  db.close();
  return new Promise((resolve) => {
    const socket = new WebSocket(`ws://${location.host}/v1/ws`, ["ramify.v1+json"]);
    socket.onopen = () => socket.send(JSON.stringify([{ type: "open", client: "looks", session, key }, { type: "tree", id: 1, text: true }]));
    socket.onmessage = ({ data }) => {
      const answer = [JSON.parse(data)].flat().find(({ id }) => id === 1);
      if (!answer) return;
      socket.close();
      resolve(JSON.stringify(answer));
    };
  });
}

scene("an answer is a form, which is checked, and a correction is a version that the model goes on from", async (page) => {
  await format(page, CARD);
  await send(page, "Describe it");
  await settled(page);
  await page.getByText(/^Valid: checked/).waitFor();
  const written = await shown(page);
  await page.getByRole("button", { name: "Form", exact: true }).click();
  const field = (name) => page.getByLabel(name, { exact: true });
  await soon(async () => assert.equal(await field("title").inputValue(), written.title));
  await soon(async () => assert.equal(await field("stars").inputValue(), String(written.stars)));
  await soon(async () => assert.equal(await field("seen").isChecked(), written.seen));
  await soon(async () => assert.equal(await field("name").inputValue(), written.author.name));
  await soon(async () => assert.equal(await page.getByRole("group", { name: "tags" }).getByRole("textbox").count(), written.tags.length));
  assert.deepEqual(await findings(page), []);

  await field("stars").fill("9");
  await page.getByText(/9 is greater than 5/).first().waitFor();
  await soon(async () => assert.equal(await field("stars").getAttribute("aria-invalid"), "true"));
  await field("stars").fill("");
  await page.getByText(/is missing/).first().waitFor();
  assert.deepEqual(await findings(page), []);
  await field("stars").fill("4");
  await page.getByText(/^Valid: the correction/).waitFor();

  await field("kind").selectOption("film");
  const group = page.getByRole("group", { name: "tags" });
  while (await group.getByRole("textbox").count() > 1) await group.getByRole("button", { name: "Remove 1" }).click();
  await group.getByRole("textbox").fill("one");
  await group.getByRole("button", { name: "Add one" }).press("Enter");
  await page.keyboard.type("two"); // the keyboard is in the new field
  if (written.note === undefined) await page.getByRole("button", { name: "Add note" }).press("Enter");
  await page.getByLabel("Which form note takes").selectOption("text");
  await page.getByRole("textbox", { name: "text" }).fill("hi");
  await page.getByText(/^Valid: the correction/).waitFor();
  await page.screenshot({ path: `${process.env.SHOTS ?? "/tmp"}/form.png` });
  await page.getByRole("button", { name: "Keep the correction" }).press("Enter");
  const corrected = { ...written, stars: 4, kind: "film", tags: ["one", "two"], note: "hi" };

  await page.waitForFunction(() => document.querySelector(".arrows > span")?.textContent === "2/2");
  await soon(async () => assert.match(await page.locator(".stats").textContent(), /corrected by you/));
  await page.getByRole("button", { name: "JSON", exact: true }).click();
  await soon(async () => assert.deepEqual(await shown(page), corrected));
  await send(page, "And now?");
  await settled(page);
  const said = `${JSON.stringify(corrected, null, 1).replace(/\n */g, " ").replace(/([{[]) /g, "$1").replace(/ ([}\]])/g, "$1")}`;
  assert.ok((await page.evaluate(told)).includes(JSON.stringify(said).slice(1, -1)), said);
  await page.getByRole("button", { name: "Earlier version" }).click();
  await soon(async () => assert.deepEqual(await shown(page), written));
  await page.reload();
  await page.getByRole("button", { name: "Later version" }).click();
  await soon(async () => assert.deepEqual(await shown(page), corrected));
}, { settings: { max_tokens: 400 } });

scene("a pattern that would take for ever is given up, and the page stays quick", async (page) => {
  await page.evaluate(async (kept) => {
    const { promise, resolve } = Promise.withResolvers();
    const asked = indexedDB.open("ramify");
    asked.onsuccess = () => {
      const change = asked.result.transaction(["chats", "messages"], "readwrite");
      change.objectStore("chats").put({ id: "c", title: "Slow", created: 1, updated: 1, client: "c", epoch: 0, names: 1, chosen: "q" });
      for (const each of kept) change.objectStore("messages").put({ chat: "c", state: "done", created: 1, ...each });
      change.oncomplete = () => resolve();
    };
    return promise;
  }, [
    { id: "q", role: "user", text: "Say it", parent: null },
    { id: "a", role: "assistant", text: JSON.stringify("a".repeat(40)), parent: "q", json: true, schema: { type: "string", pattern: "^(a|a)*b$" } },
  ]);
  await page.reload();
  await page.getByRole("button", { name: "Slow", exact: true }).click();
  await page.getByText("Checking", { exact: true }).waitFor();
  const turns = await page.evaluate(() => new Promise((resolve) => {
    let count = 0;
    const turn = () => {
      count += 1;
      if (document.body.textContent.includes("Checking it took too long.")) resolve(count);
      else setTimeout(turn, 10);
    };
    turn();
  }));
  assert.ok(turns > 3, `the page had ${turns} turns while the check went on`);
  await page.getByText("Checking it took too long.").waitFor();
});
