import assert from "node:assert/strict";
import { test } from "node:test";

import { readUIMessageStream, uiMessageChunkSchema } from "ai";

import { Chunker, turnsOf } from "../lib/ai-messages.js";
import { BadRequest } from "../lib/errors.js";

const usage = { prompt: 5, cached: 4, output: 3, queue_ms: 2 };
const text = (said) => ({ kind: "text", text: said });
const call = (number, more) => ({ kind: "call", text: "", call: number, ...more });

/** The message that the AI SDK makes of chunks, each of which its own schema takes. */
async function message(chunks) {
  const { validate } = uiMessageChunkSchema();
  for (const chunk of chunks) assert.ok((await validate(chunk)).success, JSON.stringify(chunk));
  let last;
  for await (const each of readUIMessageStream({ stream: ReadableStream.from(chunks), onError: assert.fail })) last = each;
  return last;
}

test("chunks are what the SDK takes, and its message is the turn that was said", async () => {
  const chunker = new Chunker("m1");
  const arguments_ = '{"at":"it","deep":[1]}';
  const chunks = [
    { kind: "markup", text: "<think>" }, { kind: "reasoning", text: "hm" }, { kind: "markup", text: "</think>" }, text("\n\n"), text("I "),
    text("look."), text("\n"), call(0, { id: "c0", name: "look" }), call(0, { arguments: '{"at":"it",' }), call(0, { arguments: '"deep":[1]}' }),
    text("\n"), call(1, { id: "c1", name: "cut", arguments: "{" }),
  ].flatMap((part) => chunker.said({ parts: [part] }));
  const done = { reason: "tool", usage, tool_calls: [{ id: "c0", type: "function", function: { name: "look", arguments: arguments_ } }] };
  chunks.push(...chunker.ended(done));
  const made = await message(chunks);
  assert.equal(made.id, "m1");
  assert.deepEqual(made.metadata.usage, { inputTokens: 5, cachedInputTokens: 4, outputTokens: 3, totalTokens: 8, queueMs: 2 });
  const look = made.parts.find(({ type }) => type === "tool-look");
  assert.deepEqual([look.state, look.input], ["input-available", { at: "it", deep: [1] }]);
  assert.equal(made.parts.find(({ type }) => type === "tool-cut").state, "output-error");
  // what the tool gave is added: the turn before it is the one that was said
  Object.assign(look, { state: "output-available", output: { seen: true } });
  const whole = { ...made, parts: made.parts.filter(({ type }) => type !== "tool-cut") };
  const [said, result] = turnsOf([whole]);
  assert.deepEqual(said, { ...chunker.turn(done), tool_calls: said.tool_calls });
  assert.deepEqual(said.tool_calls, chunker.turn(done).tool_calls);
  assert.deepEqual(result, { role: "tool", content: '{"seen":true}', name: "look", tool_call_id: "c0" });
});

test("a forced call was not told before, a cancelled answer says so", async () => {
  const forced = new Chunker("m");
  const made = await message(forced.ended({ reason: "tool", usage, tool_calls: [{ id: "c", function: { name: "f", arguments: "{}" } }] }));
  assert.equal(made.parts.at(-1).state, "input-available");
  assert.deepEqual(new Chunker("m").ended({ reason: "cancelled", usage }).map(({ type }) => type), ["start", "start-step", "finish-step", "abort", "finish"]);
});

test("user messages: text, text files, and what no model reads", () => {
  const file = (mediaType, url) => [{ role: "user", parts: [{ type: "text", text: "See" }, { type: "file", mediaType, filename: "n.txt", url }] }];
  assert.deepEqual(turnsOf(file("text/plain", "data:text/plain;base64,w6k="), "Be brief."),
    [{ role: "system", content: "Be brief." }, { role: "user", content: "See\n\nn.txt:\né" }]);
  assert.equal(turnsOf(file("text/csv", "data:,a%2Cb"))[0].content, "See\n\nn.txt:\na,b");
  for (const [type, url] of [["image/png", "data:,x"], ["text/plain", "https://h/x"]]) {
    assert.throws(() => turnsOf(file(type, url)), (error) => error instanceof BadRequest && /messages\[0\]\.parts\[1\]/.test(error.message));
  }
  const pictures = ["data:image/png;base64,aWNvbg==", "https://h/x.png"].map((url) => ({ type: "file", mediaType: "image/png", url }));
  assert.deepEqual(turnsOf([{ role: "user", parts: [{ type: "text", text: "a\ufffcb" }, ...pictures, { type: "text", text: "\ufffc" }] }]),
    [{ role: "user", content: "a\ufffdb\ufffc\ufffc\ufffd", images: ["aWNvbg==", btoa("https://h/x.png")] }]);
  assert.equal(turnsOf([{ role: "user", parts: [{ type: "data-x", data: 1 }, { type: "text", text: "a" }] }])[0].content, "a");
});

test("results that failed or were denied, and calls without one", () => {
  const part = (state, more) => ({ type: "dynamic-tool", toolName: "f", toolCallId: state, state, input: {}, ...more });
  const parts = [part("output-error", { errorText: "no" }), part("output-denied"), part("input-available")];
  const [said, ...results] = turnsOf([{ role: "assistant", parts }]);
  assert.deepEqual(said.tool_calls.map(({ id }) => id), ["output-error", "output-denied"]);
  assert.deepEqual(results.map(({ content }) => content), ["no", "The user did not allow this call."]);
  assert.deepEqual(turnsOf([{ role: "assistant", parts: [part("input-available")] }]), []);
});
