import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";

import {
  BadRequest, Cancelled, ConnectionLost, Forbidden, Internal, Replaced, SessionLost, Unauthorized, connect,
} from "../lib/index.js";

/** A socket whose server is the test. */
class Wire {
  static made = [];
  static get last() { return Wire.made.at(-1); }
  sent = [];

  constructor(url, protocols) {
    Object.assign(this, { url, protocols });
    Wire.made.push(this);
  }

  send(text) { this.sent.push(JSON.parse(text)); }
  close() { this.closed = true; }
  /** The server accepts; `open` is in `sent` then. */
  accept() { this.onopen(); return this; }
  say(...messages) { this.onmessage({ data: JSON.stringify(messages) }); return this; }
  end(code, reason = "") { this.onclose({ code, reason }); }
  /** The session is attached. */
  attach(more = {}) {
    return this.accept().say({ type: "state", session: "s", key: "k", revision: 1, op: 0, branches: [{ branch: "main", position: 0 }], ...more });
  }
  get ops() { return this.sent.slice(1).flat(); }
}

const turn = async () => { for (let i = 0; i < 12; i += 1) await Promise.resolve(); };
const rejected = (promise) => promise.then(() => null, (error) => error);
const made = (options) => connect("ws://host", { WebSocket: Wire, client: "c", ...options });

beforeEach(() => {
  Wire.made = [];
  mock.timers.enable({ apis: ["setTimeout", "setInterval", "Date"] });
});
afterEach(() => mock.timers.reset());

/** Advance, and let promises run. */
async function later(ms) {
  mock.timers.tick(ms);
  await turn();
}

test("the address: a path is added, http becomes ws", async () => {
  for (const [given, used] of [["ws://h:1", "ws://h:1/v1/ws"], ["https://h", "wss://h/v1/ws"], ["h:8765", "ws://h:8765/v1/ws"], ["ws://h/x", "ws://h/x"]]) {
    connect(given, { WebSocket: Wire });
    await turn();
    assert.equal(Wire.last.url, used);
  }
});

test("without a WebSocket it says what to do", async () => {
  const { WebSocket } = globalThis;
  delete globalThis.WebSocket;
  try {
    const error = await rejected(connect("ws://h").ready);
    assert.match(error.message, /give one/);
  } finally {
    if (WebSocket) globalThis.WebSocket = WebSocket;
  }
});

test("ops of one turn go out in one frame, after `open`", async () => {
  const session = made({ open: { parts: true } });
  session.append("hello");
  const generation = session.generate({ max_tokens: 3 });
  await turn();
  Wire.last.attach();
  assert.deepEqual(Wire.last.sent[0], { type: "open", client: "c", parts: true });
  assert.deepEqual(Wire.last.sent[1].map(({ id, type }) => [id, type]), [[1, "append"], [2, "generate"]]);
  assert.equal(generation.id, 2);
  assert.equal(await session.ready, session);
});

test("a first connection that fails ends the session, unless `retry` is always", async () => {
  const once = made();
  await turn();
  Wire.last.end(1006);
  assert.ok((await rejected(once.ready)) instanceof ConnectionLost);
  assert.equal(once.status, "closed");
  const always = made({ retry: "always" });
  await turn();
  Wire.last.end(1006);
  await later(200);
  assert.equal(Wire.made.length, 3);
  Wire.last.attach();
  assert.equal(always.status, "open");
});

test("a lost connection is made again, with what is here and what has no reply", async () => {
  const session = made();
  await turn();
  Wire.last.attach();
  const generation = session.generate();
  await turn();
  Wire.last.say({ type: "delta", branch: "main", position: 3, text: "Hel" });
  Wire.last.end(1006);
  assert.equal(session.status, "waiting");
  await later(200);
  const { have, key, revision } = Wire.last.accept().sent[0];
  assert.deepEqual([have, key, revision], [{ main: 3 }, "k", 1]);
  const usage = { prompt: 0, output: 5 };
  Wire.last.say({ type: "state", session: "s", key: "k", revision: 2, op: 1, branches: [{ branch: "main", position: 5 }] },
    { type: "delta", branch: "main", position: 5, text: "lo" },
    { type: "done", id: 1, branch: "main", position: 5, reason: "length", usage });
  assert.equal((await generation.result).text, "Hello");
});

test("delays grow while the server is away, and it gives up in the end", async () => {
  mock.method(Math, "random", () => 0.999);
  const session = made({ giveUpMs: 60_000 });
  await turn();
  Wire.last.attach();
  const tries = [];
  const begun = Date.now();
  for (let i = 0; i < 400 && session.status !== "closed"; i += 1) {
    if (Wire.last.onclose) {
      tries.push(Date.now() - begun);
      Wire.last.end(1006);
    }
    await later(250);
  }
  assert.match(session.error.message, /no way back to the server in 60 s/);
  assert.ok(tries.length > 6 && tries.length < 20, String(tries));
  Math.random.mock.restore();
});

test("a token is asked for anew for each connection, and not for ever", async () => {
  let asked = 0;
  const session = made({ token: async () => `t${++asked}` });
  await turn();
  Wire.last.attach();
  assert.equal(Wire.last.sent[0].token, "t1");
  for (let i = 2; i <= 4; i += 1) {
    Wire.last.end(4401, "withdrawn");
    await later(1000);
    assert.equal(Wire.last.accept().sent[0].token, `t${i}`);
  }
  Wire.last.end(4401);
  assert.ok(session.error instanceof Unauthorized);
  const refused = made({ token: () => Promise.reject(new Forbidden("no")) });
  assert.ok((await rejected(refused.ready)) instanceof Forbidden);
});

test("where `open` is too long for who has shown no token, the token is in the subprotocol", async () => {
  made({ token: "sécret+/", open: { tools: [{ name: "x".repeat(9000) }] } });
  await turn();
  const [, bearer] = Wire.last.protocols;
  assert.equal(Buffer.from(bearer.replace("ramify.bearer.", ""), "base64url").toString(), "sécret+/");
  assert.equal(Wire.last.accept().sent[0].token, undefined);
});

test("close codes that are final, and what they throw", async () => {
  for (const [code, kind] of [[4409, Replaced], [4403, Forbidden], [4400, BadRequest], [1000, ConnectionLost]]) {
    const session = made();
    await turn();
    Wire.last.attach();
    const waiting = session.append("x");
    await turn();
    Wire.last.end(code, "why");
    assert.ok((await rejected(waiting)) instanceof kind, String(code));
    assert.ok((await rejected(session.append("y"))) instanceof kind, String(code));
  }
});

test("a session that the server forgot ends, or with `renew` another one begins", async () => {
  const gone = { type: "error", code: "no_session", message: "gone" };
  const session = made();
  await turn();
  Wire.last.attach().end(1006);
  await later(200);
  Wire.last.accept().say(gone);
  assert.ok(session.error instanceof SessionLost);
  const renewed = made({ renew: true });
  const lost = [];
  renewed.addEventListener("lost", ({ detail }) => {
    lost.push(detail.code);
    renewed.append("again").catch(() => {});
  });
  await turn();
  Wire.last.attach();
  const waiting = renewed.append("x");
  await turn();
  Wire.last.end(1012);
  await later(200);
  Wire.last.accept().say(gone);
  assert.equal((await rejected(waiting)).code, "no_session");
  assert.deepEqual(Wire.last.sent[1], { type: "open", client: "c" });
  Wire.last.say({ type: "state", session: "new", key: "q", revision: 1, op: 0, branches: [{ branch: "main", position: 0 }] });
  assert.deepEqual([lost, renewed.id, Wire.last.sent[2].text], [["no_session"], "new", "again"]);
});

test("a connection that is dead without a word is noticed", async () => {
  const session = made();
  await turn();
  Wire.last.attach();
  await later(20_000);
  assert.deepEqual(Wire.last.sent.at(-1), { type: "ping" });
  Wire.last.say({ type: "pong", n: 0, load: {} });
  await later(20_000);
  await later(10_000);
  assert.equal(session.status, "waiting");
});

test("the browser's words: offline, online, a page that is hidden and seen again", async () => {
  const page = Object.assign(new EventTarget(), { visibilityState: "visible" });
  const kept = {};
  for (const name of ["addEventListener", "document"]) kept[name] = Object.getOwnPropertyDescriptor(globalThis, name);
  const browser = new EventTarget();
  globalThis.addEventListener = browser.addEventListener.bind(browser);
  globalThis.document = page;
  const turnTo = (state) => {
    page.visibilityState = state;
    page.dispatchEvent(new Event("visibilitychange"));
  };
  try {
    const session = made({ pauseHidden: true });
    await turn();
    Wire.last.attach();
    browser.dispatchEvent(new Event("offline"));
    assert.equal(session.status, "offline");
    await later(60_000);
    assert.equal(Wire.made.length, 1);
    browser.dispatchEvent(new Event("online"));
    await turn();
    Wire.last.attach({ branches: [{ branch: "main", position: 7 }] });
    turnTo("hidden");
    assert.deepEqual(Wire.last.sent.at(-1), [{ type: "credit", branch: "main", upto: 0 }]); // nothing of it is here
    turnTo("visible");
    assert.deepEqual(Wire.last.sent.slice(-2), [[{ type: "credit", branch: "main", upto: Number.MAX_SAFE_INTEGER }], { type: "ping" }]);
    await later(5_000);
    assert.equal(session.status, "waiting"); // nobody answered
    turnTo("hidden");
    turnTo("visible");
    await turn();
    assert.equal(session.status, "connecting");
  } finally {
    for (const [name, descriptor] of Object.entries(kept)) {
      if (descriptor) Object.defineProperty(globalThis, name, descriptor);
      else delete globalThis[name];
    }
  }
});

test("a signal takes an op back, or cancels it, and rejects with its reason", async () => {
  const session = made();
  const early = new AbortController();
  const unsent = session.generate({ signal: early.signal });
  await turn();
  early.abort(new Error("never mind"));
  assert.equal((await rejected(unsent.result)).message, "never mind");
  Wire.last.attach();
  assert.deepEqual(Wire.last.ops, []);
  const late = new AbortController();
  const running = session.generate({ signal: late.signal });
  const append = session.append("x", { signal: AbortSignal.abort() });
  assert.equal((await rejected(append)).name, "AbortError");
  await turn();
  late.abort();
  await turn();
  assert.equal((await rejected(running.result)).name, "AbortError");
  const [, cancel] = Wire.last.ops;
  assert.deepEqual(cancel, { id: 2, type: "cancel", ops: [1] });
});

test("a generation that is cancelled before it is sent is not sent, nor is what follows it there", async () => {
  const session = made();
  const append = session.append("x");
  const generation = session.generate();
  const behind = session.generate();
  await generation.cancel();
  assert.ok((await rejected(generation.result)) instanceof Cancelled);
  assert.ok((await rejected(behind.result)) instanceof Cancelled); // what it was skipped for
  await turn();
  Wire.last.attach();
  assert.deepEqual(Wire.last.ops.map(({ type }) => type), ["append"]);
  append.catch(() => {});
});

test("leaving a loop cancels, calling next does not", async () => {
  const session = made();
  await turn();
  Wire.last.attach();
  const [read, left] = [session.generate(), session.generate({ branch: "b" })];
  await turn();
  Wire.last.say({ type: "delta", branch: "main", position: 1, text: "a" }, { type: "delta", branch: "b", position: 1, text: "b" });
  assert.equal((await read[Symbol.asyncIterator]().next()).value.text, "a");
  for await (const { text } of left) if (text) break;
  await turn();
  assert.deepEqual(Wire.last.ops.filter(({ type }) => type === "cancel").map(({ ops }) => ops), [[left.id]]);
});

test("what the server may not say ends the session", async () => {
  for (const data of ["{", '{"type":"ok","id":1}']) {
    const session = made();
    await turn();
    Wire.last.attach();
    session.generate();
    await turn();
    Wire.last.onmessage({ data });
    assert.ok(session.error instanceof Internal, data);
  }
});

test("ops over the rate wait", async () => {
  const session = made();
  await turn();
  Wire.last.attach({ limits: { ops_per_second: 10, ops_burst: 10 } });
  for (let i = 0; i < 3; i += 1) {
    for (let n = 0; n < 5; n += 1) session.append("x").catch(() => {});
    await turn();
  }
  assert.equal(Wire.last.ops.length, 10);
  await later(500);
  assert.equal(Wire.last.ops.length, 15);
});

test("what is stored brings a page back to its session", async () => {
  const kept = new Map();
  const storage = { getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => kept.set(key, value), removeItem: (key) => kept.delete(key) };
  const first = connect("ws://host", { WebSocket: Wire, storage });
  await turn();
  Wire.last.attach();
  const second = connect("ws://host", { WebSocket: Wire, storage });
  await turn();
  const { client, session, key } = Wire.last.accept().sent[0];
  assert.deepEqual([client, session, key], [first.client, "s", "k"]);
  await second.close();
  assert.equal(kept.size, 0);
});

test("a frame that is too big for the path fails, and the rest goes on", async () => {
  const session = made();
  await turn();
  Wire.last.attach();
  const small = session.append("x");
  await turn();
  const big = session.append("y".repeat(100));
  await turn();
  Wire.last.end(1009);
  assert.equal((await rejected(big)).code, "limit");
  await later(200);
  Wire.last.attach();
  assert.deepEqual(Wire.last.ops.map(({ text }) => text), ["x"]);
  small.catch(() => {});
});

test("the text of another client's generation is told as an event", async () => {
  const session = made();
  const heard = [];
  session.addEventListener("text", ({ detail }) => heard.push(detail.text));
  await turn();
  Wire.last.attach();
  Wire.last.say({ type: "delta", branch: "main", position: 2, text: "theirs" });
  assert.deepEqual(heard, ["theirs"]);
  assert.equal(session.position("main"), 2);
});

test("a session is made of a file once, and what it cannot be is told", async () => {
  const file = Uint8Array.from({ length: 20_000 }, (_, i) => i % 256);
  const session = made({ import: file, retry: "always", renew: true });
  await turn();
  const { import: sent, session: none } = Wire.last.accept().sent[0];
  assert.deepEqual([sent, none], [Buffer.from(file).toString("base64"), undefined]);
  Wire.last.say({ type: "state", session: "s", key: "k", revision: 1, op: 0, branches: [{ branch: "main", position: 3 }] });
  Wire.last.end(1006);
  await later(200);
  assert.equal(Wire.last.attach().sent[0].import, undefined);
  const export_ = session.export();
  await turn();
  assert.deepEqual(Wire.last.ops.map(({ type }) => type), ["export"]);
  Wire.last.say({ type: "ok", id: 1, result: { file: sent } });
  assert.deepEqual(await export_, file);
  const broken = session.export();
  await turn();
  Wire.last.say({ type: "ok", id: 2, result: { file: "!" } });
  assert.ok((await rejected(broken)) instanceof Internal);

  const large = made({ import: file, retry: "always" }); // it would be too large again
  await turn();
  Wire.last.accept().end(1009);
  assert.equal((await rejected(large.ready)).code, "limit");
  assert.throws(() => made({ import: file, session: "s", key: "k" }), BadRequest);
  assert.throws(() => made({ import: "text" }), BadRequest);
});

test("a file comes before the session that a page has kept", async () => {
  const kept = new Map([["ramify ws://host/v1/ws", JSON.stringify({ client: "c", session: "old", key: "k" })]]);
  const storage = { getItem: (name) => kept.get(name) ?? null, setItem: (name, text) => kept.set(name, text), removeItem: (name) => kept.delete(name) };
  made({ import: new Uint8Array([1]), storage });
  await turn();
  assert.equal(Wire.last.accept().sent[0].session, undefined);
  Wire.last.say({ type: "state", session: "new", key: "k2", revision: 1, op: 0, branches: [] });
  assert.equal(JSON.parse(kept.get("ramify ws://host/v1/ws")).session, "new");
});
