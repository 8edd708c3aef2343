/**
 * Runs the cases of tests/clients/conformance.json through this client and prints what came of each step.
 * tests/e2e/test_conformance.py does the same with the Python client, and compares.
 *
 *     node conformance.js URL < cases.json
 */

import { text } from "node:stream/consumers";

import { connect } from "../lib/index.js";

const [url] = process.argv.slice(2);
const cases = JSON.parse(await text(process.stdin));

const FACTS = ["max", "position", "pointer"]; // of an error's details, what both clients tell

/** Sockets that a case can break as a lost network would. */
const sockets = new Set();
class Breakable extends WebSocket {
  constructor(...args) {
    super(...args);
    sockets.add(this);
  }
}

/** What a promise came to. */
async function outcome(promise) {
  try {
    return await promise;
  } catch (error) {
    const { code, constructor, details } = error;
    if (!code) throw error;
    const facts = Object.entries(details ?? {}).filter(([key]) => FACTS.includes(key));
    return { error: code, kind: constructor.name, ...(facts.length && { details: Object.fromEntries(facts) }) };
  }
}

const ok = ({ branch, position, result }) => ({ branch, position, result });
const replies = (reply) => (Array.isArray(reply) ? reply.map(ok) : ok(reply));

/** A generation, read to its end: its result, and the text that its deltas gave. */
async function read(generation) {
  let streamed = "";
  for await (const { text: fresh, cut } of generation) streamed = streamed.slice(0, streamed.length - cut) + fresh;
  const done = await generation.result;
  const { branch, text: whole, reason, position, stop, choice, scores, tokens, content, reasoning, notes, usage } = done;
  const calls = done.tool_calls?.map(({ function: called }) => called);
  return { branch, text: whole, streamed, reason, position, stop, choice, scores, tokens, content, reasoning, notes, calls,
    logprobs: done.logprobs?.length, mean: done.mean_logprob !== undefined, prompt: usage.prompt, output: usage.output };
}

const shownTree = (state) => ({
  branches: state.branches.map(({ branch, position, parent, at, reason, meta, turns }) => ({
    branch, position, parent, at, reason, meta,
    turns: turns?.map(({ kind, start, end, text: said, tokens }) => ({ kind, start, end, text: said, tokens })) })),
  meta: state.meta,
});

class Play {
  clients = new Map();
  started = new Map();
  files = new Map();

  async attach({ as = "", to, view, client, key, imports, ...open }) {
    const peer = to === undefined ? undefined : this.clients.get(to);
    const { token, ...fields } = open;
    const file = this.files.get(imports);
    const where = peer && { session: peer.id, key: key ?? (view ? peer.viewKey : peer.key) };
    const session = connect(url, { client, token, ...where, ...(file && { import: file }), open: fields, WebSocket: Breakable });
    await session.ready;
    this.clients.set(as, session);
    return { branches: session.state.branches.map(({ branch, position }) => ({ branch, position })) };
  }

  async step({ do: what, who = "", branch, as, ...fields }) {
    const session = this.clients.get(who);
    const on = session?.branch(branch ?? "main");
    switch (what) {
      case "attach": return this.attach({ as, ...fields });
      case "append": {
        const { text: raw, messages, tokens, ...options } = fields;
        return replies(await on.append(raw ?? messages ?? tokens, options));
      }
      case "say": return ok(await on.say(fields.text));
      case "chat": return read(on.chat(fields.text, fields.options));
      case "generate": return read(on.generate(fields));
      case "many": {
        const { n, ...options } = fields;
        return Promise.all(on.generateMany(n, { as, ...options }).map(read));
      }
      case "start":
        this.started.set(as, on.generate(fields));
        return null;
      case "some": { // wait for so many characters, then leave it running
        const reading = this.started.get(as)[Symbol.asyncIterator]();
        let got = 0;
        while (got < fields.characters) got += (await reading.next()).value.text.length;
        return null;
      }
      case "leave": // stop reading: that cancels it
        for await (const { text: got } of this.started.get(as)) if (got) break;
        return null;
      case "stop": await this.started.get(as).cancel(); return null;
      case "result": {
        const { text: whole, reason, position } = await this.started.get(as).result;
        return { reason, ...(fields.whole && { position, text: whole }) };
      }
      case "select": {
        const { choices, ...options } = fields;
        return read(on.select(choices, options));
      }
      case "fork": await on.fork(as, fields); return null;
      case "root": await session.fork(as, { branch: null }); return null;
      case "join": {
        const { from, ...options } = fields;
        return ok(await on.join(from, options));
      }
      case "prune": {
        const { from, ...options } = fields;
        return ok(await session.prune(from, options));
      }
      case "rollback": return ok(await on.rollback(fields));
      case "set": return ok(await on.set(fields));
      case "note": return ok(await session.set(fields));
      case "drop": return ok(await on.drop());
      case "cancel": return ok(await on.cancel(fields));
      case "tree": return shownTree(await session.tree({ branch, ...fields }));
      case "export":
        this.files.set(as, await session.export());
        return null;
      case "position": return { position: on.position };
      case "credit": on.credit(fields.upto); return null;
      case "event": {
        for await (const note of session.events()) {
          if (note.type === "event" && note.op === fields.op) return { op: note.op, branch: note.branch, details: note.details };
        }
        return null;
      }
      case "foreign": { // text of others
        let heard = "";
        for await (const note of session.events()) {
          if (note.type === "delta") heard += note.text;
          if (note.type === "event" && note.op === "generate") return { text: heard, reason: note.details.reason };
        }
        return null;
      }
      case "send": {
        const handles = session.send(fields.ops);
        return Promise.all(handles.map((each) => outcome(
          Array.isArray(each) ? Promise.all(each.map((one) => outcome(read(one)))) : each instanceof Promise ? each.then(replies) : read(each))));
      }
      case "refused": { // as a whole: what for
        const handles = session.send(fields.ops).flat();
        const ends = await Promise.allSettled(handles.map((each) => (each instanceof Promise ? each : each.result)));
        throw ends.map(({ reason }) => reason).find(({ code }) => code !== "skipped");
      }
      case "break":
        for (const socket of sockets) socket.close();
        sockets.clear();
        return null;
      case "over": { // the session has ended: why
        while (!session.error) await new Promise((resolve) => session.addEventListener("status", resolve, { once: true }));
        return { kind: session.error.constructor.name };
      }
      case "close": await session.close(fields); return null;
      default: throw new Error(`no such step: ${what}`);
    }
  }
}

const shown = {};
for (const { name, open = {}, attach = true, steps } of cases) {
  const play = new Play();
  shown[name] = [];
  if (attach) await play.attach(open);
  for (const { want, ...step } of steps) shown[name].push((await outcome(play.step(step))) ?? null);
  for (const session of play.clients.values()) await session.close();
}
process.stdout.write(JSON.stringify(shown));
