/** Tools of an MCP server: offered where a person wants them, called where a person allows it. */

import assert from "node:assert/strict";
import { findings, scene, send, settled, soon } from "./harness.mjs";

const card = (page) => page.locator(".card.call");
const results = (page) => page.locator(".card.result pre").allTextContents();
const allow = (page, how) => page.getByRole("button", { name: how });

scene("a tool of an MCP server is called once it is allowed, then as often as the chat needs it", async (page) => {
  await page.keyboard.press("Control+,");
  await page.getByLabel(/^shop/).check();
  await page.locator("dialog[open]").getByText("1 tool", { exact: true }).waitFor();
  assert.deepEqual(await findings(page), []);
  await page.getByRole("button", { name: "Done" }).click();
  await page.getByRole("button", { name: "1 tool that the model can ask for: shop" }).waitFor();

  await send(page, "What is 31 + 47?");
  await settled(page);
  await card(page).waitFor();
  assert.match(await card(page).textContent(), /calculator.*31 \+ 47/s);
  assert.deepEqual(await findings(page), []);
  await page.screenshot({ path: `${process.env.SHOTS ?? "/tmp"}/tools.png` });
  await page.waitForTimeout(300);
  assert.deepEqual(await results(page), []); // nothing is called before it is allowed

  await page.route("**/v1/mcp/shop", (route) => route.fulfill({ status: 502, json: { type: "error", code: "internal", message: "shop cannot be asked: OSError" } }));
  await allow(page, "Allow once").click();
  await page.getByText("No answer: shop cannot be asked: OSError").waitFor();
  await page.unroute("**/v1/mcp/shop");
  page.context().problems.length = 0; // the browser says that 502 is an error
  await allow(page, "Allow once").click();
  await soon(async () => assert.deepEqual(await results(page), ["78"]));
  await settled(page);

  await page.getByRole("button", { name: /^Retry/ }).first().click(); // the same call: it was allowed once only
  await allow(page, "Allow in this chat").click();
  await soon(async () => assert.deepEqual(await results(page), ["78"]));
  await settled(page);
  await page.getByRole("button", { name: /^Retry/ }).first().click();
  await page.waitForFunction(() => document.querySelector(".arrows > span")?.textContent === "3/3");
  await soon(async () => assert.deepEqual(await results(page), ["78"]));
  await settled(page);

  await page.reload(); // what was allowed is kept with the chat
  await page.getByRole("button", { name: /^Retry/ }).first().click();
  await page.waitForFunction(() => document.querySelector(".arrows > span")?.textContent === "4/4");
  await soon(async () => assert.deepEqual(await results(page), ["78"]));
}, { settings: { max_tokens: 80 } });

scene("arguments that do not fit a tool's schema reach the model, not the server", async (page) => {
  let called = 0;
  await page.route("**/v1/mcp/shop", async (route) => {
    const { id, method } = route.request().postDataJSON();
    const parameters = { type: "object", properties: { expression: { type: "string", pattern: "^[a-z]+$" } }, required: ["expression"] };
    if (method === "tools/call") called += 1;
    const result = { initialize: { protocolVersion: "2025-06-18" }, "tools/list": { tools: [{ name: "calculator", description: "Work out a sum", inputSchema: parameters }] } }[method];
    return result ? route.fulfill({ contentType: "text/event-stream", body: `event: message\ndata: {"jsonrpc":"2.0","id":${id},\ndata: "result":${JSON.stringify(result)}}\n\n` }) : route.fulfill({ status: 202 });
  });
  await page.keyboard.press("Control+,");
  await page.getByLabel(/^shop/).check();
  await page.locator("dialog[open]").getByText("1 tool", { exact: true }).waitFor();
  await page.getByRole("button", { name: "Done" }).click();
  await send(page, "What is 31 + 47?");
  await settled(page);
  await page.evaluate(async () => { // the model was held to the pattern; say that it had not been
    const db = await new Promise((resolve) => { const asked = indexedDB.open("ramify"); asked.onsuccess = () => resolve(asked.result); });
    const messages = db.transaction("messages", "readwrite").objectStore("messages");
    const [call] = (await new Promise((resolve) => { const asked = messages.getAll(); asked.onsuccess = () => resolve(asked.result); })).filter(({ calls }) => calls);
    call.calls[0].arguments = "{\"expression\": \"31 + 47\"}";
    await new Promise((resolve) => { messages.put(call).onsuccess = resolve; });
    db.close();
  });
  await page.reload();
  await allow(page, "Allow once").click();
  await soon(async () => assert.match((await results(page))[0], /^Error: .*expression/));
  assert.equal(called, 0);
}, { settings: { max_tokens: 80 } });
