import assert from "node:assert/strict";
import { test } from "node:test";

import { Core } from "../lib/core.js";
import { BadRequest, Conflict, LimitExceeded, SessionLost } from "../lib/errors.js";

const state = (more) => ({ type: "state", session: "s", key: "k", revision: 1, op: 0, branches: [], ...more });
const main = (more) => ({ branch: "main", position: 0, ...more });
const delta = (position, text, more) => ({ type: "delta", branch: "main", position, text, ...more });
const usage = (prompt, output = 1) => ({ prompt, cached: 0, computed: prompt, output, forced: 0, hit: {}, queue_ms: 0, ttft_ms: 0, total_ms: 0 });
const done = (position, prompt, more) => ({ type: "done", id: 1, branch: "main", position, reason: "stop", usage: usage(prompt), ...more });

/** A core that is attached, with these branches. */
function attached(branches = [main()], more = {}) {
  const core = new Core({ client: "t" });
  core.connected();
  core.receive(state({ branches, ...more }));
  return core;
}

/** Queue ops as one frame and send it. */
function sent(core, ...ops) {
  const frame = [];
  const tickets = ops.map((op) => core.ticket(op, frame));
  core.submit(frame);
  core.nextFrame();
  return tickets;
}

const generating = (core) => {
  const [ticket] = sent(core, { type: "generate", branch: "main" });
  return { ticket, stream: ticket.streams.get("main") };
};
const heads = (core) => [...core.heads.byName].map(([name, { position, received }]) => [name, position, received]).sort();

test("it resumes where it was, and an op that is answered twice counts once", () => {
  const core = attached();
  const { stream } = generating(core);
  core.receive(delta(5, "Hel"));
  core.disconnected();
  const { have, session, key, revision } = core.connected();
  assert.deepEqual([have, session, key, revision], [{ main: 5 }, "s", "k", 1]);
  const running = main({ position: 8, running: 1, started_at: 2 });
  core.receive([state({ op: 1, revision: 2, branches: [running] }), delta(8, "lo")]);
  assert.deepEqual(core.nextFrame().map(({ id, op }) => [id, op.type]), [[1, "generate"]]);
  core.receive(done(8, 2));
  core.receive(done(8, 2, { text: "Hello" }));
  assert.equal(stream.text, "Hello");
  assert.equal(core.nextFrame(), null);
  assert.deepEqual(core.running(), []);
});

test("truncate takes text back before more is added", () => {
  const core = attached();
  const { stream } = generating(core);
  core.receive([delta(4, "On"), delta(6, "ce up")]);
  assert.equal(stream.take().text, "Once up");
  core.receive(delta(9, "One day", { truncate: 0 }));
  const second = stream.take();
  assert.deepEqual([second.cut, second.text], [7, "One day"]);
  core.receive(done(9, 2));
  assert.equal(stream.text, "One day");
});

test("a repeated done replaces the text of another generation", () => {
  const core = attached();
  const { stream } = generating(core);
  core.receive(delta(4, "mine"));
  core.receive([state({ op: 1, revision: 9, branches: [main({ position: 30 })] }),
    delta(30, "not mine", { truncate: 2 }), done(8, 2, { text: "mine, all" })]);
  assert.equal(stream.text, "mine, all");
});

test("what was read stays read where done repeats the text", () => {
  const core = attached();
  const { stream } = generating(core);
  core.receive(delta(4, "Once"));
  stream.take();
  core.receive(done(8, 0, { text: "Once upon" }));
  const rest = stream.take();
  assert.deepEqual([rest.cut, rest.text], [0, " upon"]);
});

test("another page of the same client adopts what still runs", () => {
  const before = attached();
  generating(before);
  const core = new Core({ client: "t" }, { session: "s", key: "k" });
  assert.equal(core.connected().have, undefined);
  const running = main({ position: 9, running: 1, started_at: 7 });
  core.receive([state({ op: 1, branches: [running] }), delta(9, "so far")]);
  const [{ stream }] = core.running();
  assert.equal(stream.text, "so far");
  core.receive([delta(11, ", so good"), done(11, 7)]);
  assert.equal(stream.text, "so far, so good");
  assert.equal(core.nextFrame(), null);
  assert.equal(sent(core, { type: "tree" })[0].id, 2);
});

test("an adopted generation that ended while nobody was there has ended", () => {
  const core = new Core({ client: "t" }, { session: "s", key: "k" });
  core.connected();
  core.receive(state({ op: 1, branches: [main({ position: 9, running: 1, started_at: 7 })] }));
  const [{ stream }] = core.running();
  core.receive(state({ op: 1, branches: [main({ position: 12, reason: "length" })] }));
  assert.deepEqual([stream.done.reason, core.running()], ["length", []]);
});

test("the table of branches follows joins and prunes", () => {
  const core = attached();
  const run = (op, reply) => {
    const [{ id }] = sent(core, op);
    core.receive({ type: "ok", id, ...reply });
    return heads(core);
  };
  run({ type: "fork", as: ["a", "b", "c", "d"] }, { branch: "main", position: 4, revision: 2 });
  const kept = [{ from: "b", into: "main", position: 9 }];
  const pruned = run({ type: "prune", from: ["a", "b"], into: ["main"] },
    { branch: "main", position: 9, revision: 3, result: { kept, dropped: ["a", "b"], scores: { a: 1 } } });
  assert.deepEqual(pruned, [["c", 4, 4], ["d", 4, 4], ["main", 9, 9]]);
  const joined = run({ type: "join", from: ["c"] },
    { branch: "main", position: 12, revision: 4, result: { dropped: ["c"], rebased: 8 } });
  assert.deepEqual(joined, [["d", 4, 4], ["main", 12, 8]]);
  core.receive({ type: "event", op: "prune", branch: "e", revision: 5, by: "x",
    details: { position: 7, kept: [{ from: "d", into: "e", position: 7 }], dropped: ["d"] } });
  core.receive({ type: "event", op: "join", branch: "main", revision: 6, by: "x", details: { position: 20, dropped: ["e"] } });
  assert.deepEqual(heads(core), [["main", 20, 8]]);
});

test("a rename, a drop and a rollback move the table", () => {
  const core = attached([main({ position: 9 }), { branch: "a", position: 5 }]);
  const [set] = sent(core, { type: "set", branch: "a", name: "b" });
  core.receive({ type: "ok", id: set.id, branch: "b", revision: 2 });
  const [rollback] = sent(core, { type: "rollback", branch: "main", to: 4 });
  core.receive({ type: "ok", id: rollback.id, branch: "main", position: 4, revision: 3 });
  assert.deepEqual(heads(core), [["b", 5, 5], ["main", 4, 4]]);
  const [drop] = sent(core, { type: "drop", branch: ["b"] });
  core.receive({ type: "ok", id: drop.id, branch: "b", revision: 4 });
  assert.deepEqual(heads(core), [["main", 4, 4]]);
});

test("a reply that `state` included changes nothing", () => {
  const core = attached([main({ position: 9 })]);
  const [rollback] = sent(core, { type: "rollback", branch: "main", to: 4 });
  core.receive(state({ op: 1, revision: 7, branches: [main({ position: 12 })] }));
  core.receive({ type: "ok", id: rollback.id, branch: "main", position: 4, revision: 6 });
  assert.deepEqual(heads(core), [["main", 12, 9]]);
});

test("a choice that takes the last token back", () => {
  const core = attached([main({ position: 6 })]);
  const [ticket] = sent(core, { type: "select", branch: "main", choices: ["ld", "x"] });
  core.receive(delta(6, "world", { truncate: 5 }));
  core.receive(done(6, 6, { text: "ld", choice: 0, scores: [-1, -2], rebased: 5, revision: 2 }));
  const stream = ticket.streams.get("main");
  assert.deepEqual([stream.text, stream.done.choice, heads(core)], ["ld", 0, [["main", 6, 6]]]);
});

test("what is skipped names its cause, though that was answered before", () => {
  const core = attached();
  const [first, second] = sent(core, { type: "append", branch: "main", tokens: [1] }, { type: "generate", branch: "main" });
  const [third] = sent(core, { type: "generate", branch: "main" });
  core.receive({ type: "error", id: 1, branch: "main", code: "too_long", message: "m" });
  core.receive({ type: "error", id: 2, branch: "main", code: "skipped", message: "s" });
  core.receive({ type: "error", id: 3, branch: "main", code: "skipped", message: "s" });
  const codes = [first, second, third].map(({ error }) => [error.code, error.cause?.code]);
  assert.deepEqual(codes, [["too_long", undefined], ["skipped", "too_long"], ["skipped", undefined]]);
});

test("a generation that fails on its way keeps its text in the error", () => {
  const core = attached([main({ position: 6 })]);
  const { stream } = generating(core);
  core.receive(delta(8, "so far"));
  core.receive(done(8, 6, { reason: "error", error: "internal", message: "NaN" }));
  assert.deepEqual([stream.error.code, stream.error.message, stream.error.done.text], ["internal", "NaN", "so far"]);
});

test("text of children that no reply has named yet is asked for from the start", () => {
  const core = attached([main({ position: 4 })]);
  const [, ticket] = sent(core, { type: "fork", branch: "main", as: ["a"] }, { type: "generate", branch: "a" });
  core.disconnected();
  assert.deepEqual(core.connected().have, { main: 4, a: 0 });
  core.receive([state({ op: 2, revision: 3, branches: [main({ position: 4 }), { branch: "a", position: 7, running: 2, started_at: 4 }] }),
    { type: "delta", branch: "a", position: 4, text: "inherited" }, { type: "delta", branch: "a", position: 7, text: "own" }]);
  assert.equal(ticket.streams.get("a").text, "own");
});

test("text that was lost with its branch is a conflict, not a short text", () => {
  const core = attached([main({ position: 2 })]);
  const { stream } = generating(core);
  core.receive(delta(4, "ab"));
  core.receive(state({ op: 1, revision: 5, branches: [] }));
  core.receive(done(9, 2, { reason: "length", usage: usage(2, 7) }));
  assert.ok(stream.error instanceof Conflict);
});

test("frames over the limits: those of one turn are split, whole ones are refused", () => {
  const core = attached([main()], { limits: { ops_per_frame: 2, frame_bytes: 200 } });
  const op = { type: "append", branch: "main", text: "x" };
  const three = [];
  const tickets = [op, op, op].map((each) => core.ticket(each, three));
  core.submit(three);
  assert.deepEqual([core.nextFrame(), core.nextFrame()].map((frame) => frame.map(({ id }) => id)), [[1, 2], [3]]);
  const whole = [];
  const refused = [op, op, op].map((each) => core.ticket(each, whole));
  core.submit(whole, true);
  assert.equal(core.nextFrame(), null);
  assert.ok(refused.every(({ error }) => error instanceof LimitExceeded));
  const long = [];
  const [big, behind, aside] = [{ ...op, text: "é".repeat(120) }, op, { ...op, branch: "b" }].map((each) => core.ticket(each, long));
  core.submit(long);
  assert.deepEqual(core.nextFrame().map((ticket) => ticket === aside), [true]);
  assert.deepEqual([big.error.code, behind.error.code, behind.error.cause], ["limit", "skipped", big.error]);
  assert.equal(tickets[0].error, null);
});

test("no more ops are under way than replies are kept; a cancel passes", () => {
  const core = attached([main()], { limits: { replies_kept: 2, ops_in_flight: 9 } });
  const op = { type: "append", branch: "main", text: "x" };
  sent(core, op, op);
  assert.equal(sent(core, op)[0].id, undefined);
  assert.equal(sent(core, { type: "cancel" })[0].id, 3);
  core.receive([1, 2].map((id) => ({ type: "ok", id, branch: "main", position: id, revision: id + 1 })));
  assert.deepEqual(core.nextFrame().map(({ id }) => id), [4]);
});

test("what JSON would change without a word is refused", () => {
  const core = attached();
  for (const fields of [{ text: "\ud800" }, { temperature: NaN }, { n: 3n }, { text: 'a\\"\udfff' }]) {
    assert.throws(() => core.ticket({ type: "append", ...fields }, []), BadRequest);
  }
  assert.equal(core.ticket({ type: "append", text: "\\ud800 \u{1f600}" }, []).error, null);
});

test("the end of the session fails what is under way and what comes", () => {
  const core = attached();
  const { stream, ticket } = generating(core);
  const error = new SessionLost("gone");
  core.end(error);
  const [late] = sent(core, { type: "tree" });
  assert.deepEqual([stream.error, ticket.settled, late.error, late.settled], [error, true, error, true]);
});
