// Pictures by @ai-sdk/anthropic, @ai-sdk/openai (chats and Responses) and @ai-sdk/openai-compatible. Usage: node
// pictures_with_ai_sdk.mjs URL MODEL FOLDER PICTURE, where FOLDER has them and `ai` in its node_modules.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [url, name, folder, path] = process.argv.slice(2);
const require = createRequire(resolve(folder, "package.json"));
const { APICallError, generateText } = require("ai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { baseURL: url, apiKey: "none" };
const models = {
  messages: createAnthropic(settings)(name),
  responses: createOpenAI(settings).responses(name),
  chat: createOpenAI(settings).chat(name),
  compatible: createOpenAICompatible({ ...settings, name: "ramify" })(name),
};
const file = new Uint8Array(readFileSync(path));
for (const [way, model] of Object.entries(models)) {
  const asked = (image) => generateText({
    model, maxOutputTokens: 12, maxRetries: 0, temperature: 0,
    messages: [{ role: "user", content: [{ type: "image", image, mediaType: "image/png" }, { type: "text", text: "what?" }] }],
  });
  console.log(JSON.stringify([way, (await asked(file)).text]));
  await assert.rejects(
    asked(file.slice(0, 200)),
    (error) => APICallError.isInstance(error) && error.statusCode === 400 && /is damaged.*(messages|input)\[0\]\.content\[0\]/.test(error.message),
    way,
  );
}
