/**
 * The AI SDK's own chat over both of its ways to a server: its WebSocketChatTransport at /v1/ai, and ours.
 * Prints what happened; tests/e2e/test_ai_sdk.py knows what should.
 *
 *     node ai.js ws://HOST:PORT websocket|ramify
 */

import { AbstractChat, WebSocketChatTransport } from "ai";

import { RamifyChatTransport } from "../lib/ai.js";

const [address, way] = process.argv.slice(2);
const limits = way === "websocket" ? (n) => ({ temperature: 0, maxOutputTokens: n }) : (n) => ({ temperature: 0, max_tokens: n });

const transportOf = (storage = null) =>
  way === "websocket" ? new WebSocketChatTransport({ url: `${address}/v1/ai` }) : new RamifyChatTransport({ url: address, storage });

/** The state that `useChat` keeps in React. */
class State {
  status = "ready";
  error = undefined;
  constructor(messages) { this.messages = messages; }
  pushMessage(message) { this.messages = [...this.messages, message]; }
  popMessage() { this.messages = this.messages.slice(0, -1); }
  replaceMessage(index, message) { this.messages = this.messages.with(index, message); }
  snapshot(value) { return structuredClone(value); }
}
class Chat extends AbstractChat {
  constructor({ messages = [], ...init }) {
    super({ ...init, state: new State(messages) });
  }
}

const text = (message) => message.parts.filter(({ type }) => type === "text").map((part) => part.text).join("");
const shown = (chat) => ({
  status: chat.status,
  error: chat.error?.message,
  roles: chat.messages.map(({ role }) => role),
  texts: chat.messages.map(text),
  usage: chat.messages.at(-1)?.metadata?.usage,
});
const made = (transport, id, more) => {
  const ends = [];
  const chat = new Chat({ id, transport, onFinish: ({ isAbort, isError, finishReason }) => ends.push({ isAbort, isError, finishReason }), ...more });
  return { chat, ends };
};
const until = async (condition) => {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 2));
};
const out = {};
const transport = transportOf();

{
  const { chat, ends } = made(transport, "turns");
  await chat.sendMessage({ text: "Hello." }, { body: limits(8) });
  const first = shown(chat);
  const id = chat.messages[1].id;
  await chat.sendMessage({ text: "And then?" }, { body: limits(8) });
  const second = shown(chat);
  await chat.regenerate({ body: limits(8) });
  const again = shown(chat);
  await chat.sendMessage({ text: "Something else.", messageId: chat.messages[0].id }, { body: limits(8) });
  const edited = shown(chat);
  await chat.sendMessage({ text: "Hello.", messageId: chat.messages[0].id }, { body: limits(8) });
  out.turns = { first, second, again, edited, back: shown(chat), ends, id: typeof id };
  if (transport.session) {
    const { branches } = await transport.session.tree();
    out.branches = branches.map(({ branch, parent, at, position }) => ({ branch, parent, at, position }));
  }
}
{
  const { chat, ends } = made(transport, "stopped");
  const sent = chat.sendMessage({ text: "Go on and on." }, { body: limits(4000) });
  await until(() => chat.messages[1] && text(chat.messages[1]).length > 20);
  await chat.stop();
  await sent;
  await chat.sendMessage({ text: "Enough." }, { body: limits(4) });
  out.stopped = { ...shown(chat), ends };
}
{
  const { chat } = made(transport, "wrong");
  await chat.sendMessage({ text: "Hello." }, { body: { temprature: 1 } });
  const wrong = shown(chat);
  await chat.regenerate({ body: limits(4) });
  out.wrong = { wrong, mended: shown(chat) };
}
{
  const chats = Array.from({ length: 6 }, (_, i) => made(transport, `side ${i}`).chat);
  await Promise.all(chats.map((chat, i) => chat.sendMessage({ text: `Question ${i}?` }, { body: limits(6) })));
  out.side = chats.map((chat) => shown(chat).texts);
}
{
  const kept = new Map();
  const storage = { getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => kept.set(key, value), removeItem: (key) => kept.delete(key) };
  const before = transportOf(storage);
  const { chat } = made(before, "resumed");
  const sent = chat.sendMessage({ text: "Tell me." }, { body: limits(200) }).catch(() => {});
  await until(() => chat.messages[1] && text(chat.messages[1]).length > 20);
  const { messages } = chat;
  // The page is loaded again: its sockets are gone, what it shows was stored.
  if (before.session) await before.session.close({ keep: true });
  else before.close();
  await sent;
  const after = transportOf(storage);
  const second = made(after, "resumed", { messages });
  await second.chat.resumeStream();
  const third = made(after, "nothing", { messages: [] });
  await third.chat.resumeStream();
  out.resumed = { ...shown(second.chat), nothing: shown(third.chat), same: second.chat.messages[1].id === messages[1].id };
  await after.close();
}
await transport.close();
process.stdout.write(JSON.stringify(out));
