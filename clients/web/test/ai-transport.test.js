import assert from "node:assert/strict";
import { test } from "node:test";

import { RamifyChatTransport } from "../lib/ai.js";

/** A session as far as the transport needs one: every answer is "Yes." */
class Session extends EventTarget {
  client = "c";
  sent = [];
  #made = 0;

  frame(run) { return run(); }
  freshNames() { this.#made += 1; return [`b${this.#made}`]; }
  position() { return 7; }
  fork(names, fields) { this.sent.push({ fork: names, ...fields }); return Promise.resolve({}); }
  append(messages, fields) { this.sent.push({ append: messages.map(({ content }) => content), ...fields }); return Promise.resolve({ position: 5 }); }
  generate() {
    const result = Promise.resolve({ position: 7, text: "Yes.", reason: "stop", usage: {} });
    return { result, cancel() {}, async* [Symbol.asyncIterator]() { yield { text: "Yes.", cut: 0, position: 7 }; } };
  }
  attached(state) {
    this.state = state;
    this.dispatchEvent(new Event("state"));
  }
}

const said = (id, role, text) => ({ id, role, parts: [{ type: "text", text }] });

async function turn(transport, messages) {
  const stream = await transport.sendMessages({ trigger: "submit-message", chatId: "a", messageId: undefined, messages, abortSignal: undefined });
  for await (const each of stream) void each;
}

test("what a restart of the server has lost is told again; what it has not is not", async () => {
  const session = new Session();
  const transport = new RamifyChatTransport({ session });
  const first = [said("1", "user", "one")];
  const second = [...first, said("2", "assistant", "Yes."), said("3", "user", "two")];
  await turn(transport, first);
  session.attached({ lost: false });
  session.sent.length = 0;
  await turn(transport, second);
  assert.deepEqual(session.sent, [{ append: ["two"], branch: "b1" }]);
  session.attached({ lost: true });
  session.sent.length = 0;
  await turn(transport, [...second, said("4", "assistant", "Yes."), said("5", "user", "three")]);
  assert.deepEqual(session.sent[0], { fork: ["b2"], branch: null });
  assert.deepEqual(session.sent.slice(1).flatMap(({ append }) => append), ["one", "Yes.", "two", "Yes.", "three"]);
});
