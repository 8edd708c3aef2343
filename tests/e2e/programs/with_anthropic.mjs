// The package @anthropic-ai/sdk for Node. Usage: node with_anthropic.mjs URL MODEL FOLDER, where FOLDER has
// it in its node_modules.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [url, model, folder] = process.argv.slice(2);
const require = createRequire(resolve(folder, "package.json"));
const { default: Anthropic } = require("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
const hello = [{ role: "user", content: "Hello." }];
const asked = { model, max_tokens: 24, temperature: 0 };
const calculator = {
  name: "calculator",
  input_schema: {
    type: "object",
    properties: { expression: { type: "string", maxLength: 12 } },
    required: ["expression"],
    additionalProperties: false,
  },
};

const models = [];
for await (const each of client.models.list()) models.push(each.id);
assert.deepEqual(models, [model]);

const whole = await client.messages.create({ ...asked, messages: hello });
const stream = client.messages.stream({ ...asked, messages: hello });
let text = "";
stream.on("text", (piece) => (text += piece));
const final = await stream.finalMessage();
assert.equal(text, whole.content[0].text);
assert.equal(final.content[0].text, text);
assert.ok(final.usage.cache_read_input_tokens > 0);
const counted = await client.messages.countTokens({ model, messages: hello });
const { input_tokens, cache_read_input_tokens, cache_creation_input_tokens } = final.usage;
assert.equal(input_tokens + cache_read_input_tokens + cache_creation_input_tokens, counted.input_tokens);

const messages = [{ role: "user", content: "What is 31 + 47?" }];
for (let turn = 0; turn < 5; turn++) {
  const settings = { ...asked, max_tokens: 90, messages, tools: [calculator], tool_choice: { type: "any" } };
  const answer = await client.messages.stream(settings).finalMessage();
  const calls = answer.content.filter((block) => block.type === "tool_use");
  assert.equal(answer.stop_reason, "tool_use");
  assert.ok(calls.every((call) => typeof call.input.expression === "string"));
  messages.push({ role: "assistant", content: answer.content });
  messages.push({
    role: "user",
    content: calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "78" })),
  });
}

const picture = { type: "image", source: { type: "url", url: "http://x" } };
for (const [change, kind] of [
  [{ model: "claude-9" }, Anthropic.NotFoundError],
  [{ messages: [] }, Anthropic.BadRequestError],
  [{ messages: [{ role: "user", content: [picture] }] }, Anthropic.BadRequestError],
  [{ stream: true, tools: [{ type: "web_search_20250305", name: "w" }] }, Anthropic.BadRequestError],
]) {
  const error = await client.messages.create({ ...asked, messages: hello, ...change }).then(
    () => assert.fail(JSON.stringify(change)),
    (raised) => raised,
  );
  assert.ok(error instanceof kind, String(error));
  assert.match(error.requestID, /^req_/);
}

const abandoned = client.messages.stream({ ...asked, max_tokens: 2000, messages: hello });
abandoned.on("text", () => abandoned.abort());
await assert.rejects(abandoned.finalMessage(), Anthropic.APIUserAbortError);
console.log("ok");
