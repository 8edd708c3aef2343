// What programs do with the real `openai` package for Node. Usage: node suite.mjs URL MODEL
// Prints one line of JSON: the names of cases that passed, and the errors of those that did not.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const greedy = { model, temperature: 0 };
const hello = [{ role: "user", content: "Hello." }];
const sum = "What is 31 + 47?";
const parameters = {
  type: "object",
  properties: { expression: { type: "string" } },
  required: ["expression"],
  additionalProperties: false,
};
const calculator = { name: "calculator", description: "Work out a sum", parameters };
const schema = {
  type: "object",
  properties: { age: { type: "integer", minimum: 1, maximum: 99 } },
  required: ["age"],
  additionalProperties: false,
};

/** Read a lane of a socket to the end of its response. */
function ended(socket, streamId) {
  return new Promise((resolve, reject) => {
    let text = "";
    socket.on("event", (event) => {
      if (event.type === "error") reject(new Error(JSON.stringify(event)));
      if (event.stream_id !== streamId) return;
      if (event.type === "response.output_text.delta") text += event.delta;
      if (event.type === "response.completed" || event.type === "response.incomplete") {
        resolve({ response: event.response, text });
      }
    });
    socket.on("error", reject);
  });
}

const cases = {
  async "a chat, whole and streamed"() {
    const whole = await client.chat.completions.create({ ...greedy, messages: hello });
    let text = "";
    const stream = await client.chat.completions.create({ ...greedy, messages: hello, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    assert.equal(text, whole.choices[0].message.content);
    assert.ok(whole.usage.total_tokens > 0);
  },
  async "a stream with usage"() {
    const asked = { ...greedy, messages: hello, stream: true, stream_options: { include_usage: true } };
    let usage;
    for await (const chunk of await client.chat.completions.create(asked)) usage = chunk.usage ?? usage;
    assert.ok(usage.completion_tokens > 0);
  },
  async "a tool is run by the client's own loop"() {
    const tool = {
      type: "function",
      function: {
        ...calculator,
        parse: JSON.parse,
        function: ({ expression }) => String(expression.split(" + ").reduce((a, b) => a + Number(b), 0)),
      },
    };
    const messages = [{ role: "user", content: sum }];
    const runner = client.chat.completions.runTools({ ...greedy, messages, tools: [tool] });
    assert.match(await runner.finalContent(), /78/);
  },
  async "an answer by schema"() {
    const format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    const answer = await client.chat.completions.create({ ...greedy, messages: hello, response_format: format });
    assert.ok(JSON.parse(answer.choices[0].message.content).age >= 1);
  },
  async "several choices"() {
    const answer = await client.chat.completions.create({ ...greedy, messages: hello, n: 3, temperature: 1, seed: 1 });
    assert.equal(answer.choices.length, 3);
  },
  async "completions"() {
    const answer = await client.completions.create({ ...greedy, prompt: "Once upon a time", max_tokens: 5 });
    assert.ok(answer.choices[0].text);
  },
  async "models"() {
    const ids = [];
    for await (const each of client.models.list()) ids.push(each.id);
    assert.deepEqual(ids, [model]);
  },
  async "errors have their classes"() {
    const ask = (more) => client.chat.completions.create({ ...greedy, messages: hello, ...more });
    await assert.rejects(ask({ model: "gpt-9" }), OpenAI.NotFoundError);
    await assert.rejects(ask({ frobnicate: 1 }), OpenAI.BadRequestError);
    await assert.rejects(
      ask({ messages: [{ role: "user", content: "x ".repeat(90000) }] }),
      (error) => error.code === "context_length_exceeded" && error.status === 400,
    );
  },
  async "a timeout"() {
    const asked = { ...greedy, messages: hello, ignore_eos: true, max_tokens: 3000 };
    await assert.rejects(
      client.chat.completions.create(asked, { timeout: 200 }),
      OpenAI.APIConnectionTimeoutError,
    );
  },
  async "an abort"() {
    const stop = new AbortController();
    const asked = { ...greedy, messages: hello, ignore_eos: true, max_tokens: 3000, stream: true };
    const stream = await client.chat.completions.create(asked, { signal: stop.signal });
    let count = 0;
    for await (const _ of stream) if (++count === 3) stop.abort();
    assert.ok(count >= 3);
  },
  async "a response, whole and streamed"() {
    const whole = await client.responses.create({ ...greedy, input: "Hello." });
    const stream = client.responses.stream({ ...greedy, input: "Hello." });
    const final = await stream.finalResponse();
    assert.equal(final.output_text, whole.output_text);
    const again = await client.responses.create({ ...greedy, input: "And?", previous_response_id: whole.id });
    assert.equal((await client.responses.retrieve(again.id)).previous_response_id, whole.id);
    const items = [];
    for await (const item of client.responses.inputItems.list(whole.id)) items.push(item);
    assert.equal(items[0].content[0].text, "Hello.");
    await client.responses.delete(whole.id);
    await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
  },
  async "a response that calls a tool"() {
    const tools = [{ type: "function", ...calculator, strict: true }];
    const asked = await client.responses.create({ ...greedy, input: sum, tools });
    const call = asked.output.find((item) => item.type === "function_call");
    const output = { type: "function_call_output", call_id: call.call_id, output: "78" };
    const answer = await client.responses.create({
      ...greedy, tools, input: [output], previous_response_id: asked.id,
    });
    assert.match(answer.output_text, /78/);
  },
  async "a response by schema"() {
    const text = { format: { type: "json_schema", name: "answer", schema, strict: true } };
    const answer = await client.responses.create({ ...greedy, input: "Hello.", text });
    assert.ok(JSON.parse(answer.output_text).age >= 1);
  },
  async "in the background"() {
    let found = await client.responses.create({ ...greedy, input: "Hello.", background: true });
    while (found.status === "queued" || found.status === "in_progress") {
      found = await client.responses.retrieve(found.id);
    }
    assert.equal(found.status, "completed");
  },
  async "lanes of a socket"() {
    const socket = new ResponsesWS(client);
    try {
      const lanes = ["a", "b", "c"].map((lane) => [lane, ended(socket, lane)]);
      for (const [lane] of lanes) {
        socket.send({ type: "response.create", ...greedy, input: `Hello ${lane}.`, stream_id: lane });
      }
      for (const [lane, end] of lanes) {
        const alone = await client.responses.create({ ...greedy, input: `Hello ${lane}.` });
        assert.equal((await end).text, alone.output_text);
      }
    } finally {
      socket.close();
    }
  },
  async "a conversation on a socket, stored nowhere"() {
    const socket = new ResponsesWS(client);
    try {
      const first = ended(socket, undefined);
      socket.send({ type: "response.create", ...greedy, input: "Hello.", store: false });
      const { response } = await first;
      const second = new Promise((resolve) => socket.on("response.completed", resolve));
      socket.send({
        type: "response.create", ...greedy, input: "And?", store: false, previous_response_id: response.id,
      });
      assert.equal((await second).response.previous_response_id, response.id);
    } finally {
      socket.close();
    }
  },
};

const passed = [];
const failed = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
    passed.push(name);
  } catch (error) {
    failed[name] = String(error.stack ?? error);
  }
}
console.log(JSON.stringify({ passed, failed }));
process.exit(0);
