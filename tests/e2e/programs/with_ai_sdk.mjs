// The packages @ai-sdk/anthropic, @ai-sdk/openai and @ai-sdk/openai-compatible, as opencode and others use
// them. Usage: node with_ai_sdk.mjs URL MODEL FOLDER, where FOLDER has them and `ai` in its node_modules.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [url, name, folder] = process.argv.slice(2);
const require = createRequire(resolve(folder, "package.json"));
const { generateText, jsonSchema, streamText, tool, APICallError } = require("ai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { baseURL: url, apiKey: "none" };
const models = {
  messages: createAnthropic(settings)(name),
  responses: createOpenAI(settings).responses(name),
  chat: createOpenAI(settings).chat(name),
  compatible: createOpenAICompatible({ ...settings, name: "ramify", includeUsage: true })(name),
};
const schema = jsonSchema({
  type: "object",
  properties: { expression: { type: "string", maxLength: 12 } },
  required: ["expression"],
  additionalProperties: false,
});
const calculator = tool({ description: "Work out a sum", inputSchema: schema });
const options = {
  openai: { parallelToolCalls: false, store: false },
  ramify: { reasoningEffort: "low" },
  anthropic: { effort: "low", disableParallelToolUse: true },
};

for (const [way, model] of Object.entries(models)) {
  const asked = { model, maxOutputTokens: 24, maxRetries: 0, temperature: 0, providerOptions: options };
  const whole = await generateText({ ...asked, prompt: "Hello." });
  assert.ok(whole.text, way);
  const streamed = streamText({ ...asked, prompt: "Hello." });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text.trim(), whole.text.trim(), way);
  const usage = await streamed.usage;
  assert.ok(usage.outputTokens > 0 && usage.outputTokens <= 24, way);
  const messages = [{ role: "user", content: "What is 31 + 47?" }];
  for (let turn = 0; turn < 5; turn++) {
    const said = { ...asked, maxOutputTokens: 90, messages, tools: { calculator }, toolChoice: "required" };
    const answer = turn % 2 ? streamText(said) : await generateText(said);
    const calls = await answer.toolCalls;
    assert.equal(await answer.finishReason, "tool-calls", way);
    if (way !== "compatible") assert.equal(calls.length, 1, way); // it has no word for one call at a time
    assert.ok(calls.every((call) => typeof call.input.expression === "string"), JSON.stringify([way, calls]));
    messages.push(...(await answer.response).messages);
    const output = { type: "text", value: "78" };
    const content = calls.map(({ toolCallId, toolName }) => ({ type: "tool-result", toolCallId, toolName, output }));
    messages.push({ role: "tool", content });
  }
  const picture = { type: "image", image: new Uint8Array([137, 80, 78, 71]), mediaType: "image/png" };
  await assert.rejects(
    generateText({ ...asked, messages: [{ role: "user", content: [picture] }] }),
    (error) => APICallError.isInstance(error) && error.statusCode === 400 && /reads no images/.test(error.message),
    way,
  );
}
console.log("ok");
