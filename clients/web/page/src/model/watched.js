/**
 * A chat that somebody else writes, watched with its view key: the server's tree and its deltas, nothing of one's own.
 * Has what of a `Chat` the page reads.
 */

import { signal } from "@preact/signals";
import { connect } from "../../../lib/index.js";
import { Live } from "./live.js";
import { Tree, brief } from "./tree.js";

const SOON_MS = 60; // changes that come together are looked up once
const MARKS = /<\|?[^<>|\n]{1,40}\|?>/g; // special tokens of chat templates, in input that came as raw text

export class Watched {
  #session;
  #asked = null;
  /** @type {Map<string, {position: number, last: object | null, live: Live | null}>} branch -> where its text is */ #heads = new Map();

  /** @param {{session: string, key: string, connection: {url: string, token?: Function}}} parts */
  constructor({ session, key, connection: { url, token } }) {
    this.watching = true;
    this.id = `watch ${session}`;
    this.record = { title: "A chat that you watch" };
    this.tree = new Tree();
    /** @type {Map<string, Live>} */ this.live = new Map();
    this.version = signal(0);
    this.status = signal({ status: "connecting" });
    this.notice = signal(null);
    this.#session = connect(url, { token, session, key, retry: "always", open: { tick_ms: 30 } });
    const on = (name, action) => this.#session.addEventListener(name, ({ detail }) => action(detail));
    on("status", (status) => this.#told(status));
    on("state", () => this.#soon());
    on("tree", (event) => this.#soon(event.branch));
    on("text", (delta) => this.#text(delta));
  }

  get session() { return this.#session; }
  get busy() { return this.live.size > 0; }

  choose(message) {
    this.tree.choose(message);
    this.version.value += 1;
  }

  stop() { /* only who writes may */ }
  keepDraft() { /* nothing is written here */ }
  reconnect() { this.#session.reconnect(); }
  leave() { return this.#session.close({ keep: true }); }

  #told(status) {
    this.status.value = status;
    if (status.status !== "closed") return;
    this.notice.value = { text: "This chat cannot be watched any more: its session has ended on the server, or the link is wrong. Ask for a new link." };
  }

  /** Look the tree up again, soon. */
  #soon(branch) {
    this.newest = branch ?? this.newest;
    this.#asked ??= setTimeout(async () => {
      const state = await this.#session.tree({ text: true }).catch(() => null);
      this.#asked = null;
      if (state) this.#load(state);
    }, SOON_MS);
  }

  /** Take over the server's tree. Messages that are known stay the same objects. */
  #load(state) {
    const known = this.tree.messages;
    const chosen = new Map([...known.values()].map(({ id, chosen: each }) => [id, each]));
    const messages = new Map();
    const paths = new Map();
    const heads = new Map();
    for (const branch of parentsFirst(state.branches)) {
      const { path, last } = this.#path(branch, paths.get(branch.parent) ?? [], messages, known);
      paths.set(branch.branch, path);
      heads.set(branch.branch, { position: branch.position, last, live: null, running: branch.running !== undefined, at: branch.started_at });
    }
    const first = this.tree.chosen;
    for (const message of messages.values()) message.chosen = chosen.get(message.id);
    this.tree = new Tree([...messages.values()], first);
    for (const [name, head] of heads) this.#goOn(name, head);
    for (const id of this.live.keys()) if (![...heads.values()].some(({ live }) => live?.message.id === id)) this.live.delete(id);
    this.#heads = heads;
    const newest = heads.get(this.newest)?.last;
    if (newest) this.tree.choose(newest);
    const title = [...messages.values()].find(({ role }) => role === "user");
    if (title) this.record.title = brief(title.text, 60);
    this.version.value += 1;
  }

  /** The messages of a branch; those that it shares with its parent are the parent's. */
  #path({ branch, turns = [] }, above, messages, known) {
    const path = [];
    let last = null;
    let shared = true;
    for (const [i, turn] of turns.entries()) {
      const same = shared && above[i] && above[i].turn.start === turn.start && above[i].turn.end === turn.end && above[i].turn.op === turn.op;
      shared = Boolean(same);
      const said = same ? null : read(turn);
      const message = same ? above[i].message : said && { ...blank(known, `${branch} ${turn.start}`), ...said, parent: last?.id ?? null };
      if (message && !same) messages.set(message.id, message);
      path.push({ turn, message });
      last = message ?? last;
    }
    return { path, last };
  }

  /** What runs on a branch is shown as it comes. */
  #goOn(name, head) {
    if (!head.running) return;
    const before = this.#heads.get(name);
    if (head.last?.role !== "assistant" || head.last.start !== head.at) head.last = this.#answer(head, name, head.at);
    const kept = before?.live?.message.id === head.last.id ? before : null;
    head.live = kept?.live ?? new Live(head.last, null);
    head.live.message = head.last;
    if (kept && kept.position > head.position) head.position = kept.position; // deltas that the tree does not show yet
    else head.live.text = head.last.text;
    head.last.state = "running";
    this.live.set(head.last.id, head.live);
  }

  #answer(head, name, start) {
    return this.tree.add({ id: `${name} ${start}`, created: Date.now(), parent: head.last?.id ?? null, role: "assistant", text: "", state: "running", start });
  }

  #text({ branch, position, text, truncate }) {
    const head = this.#heads.get(branch);
    if (!head || truncate !== undefined) return this.#soon(branch);
    if (position <= head.position) return undefined;
    if (!head.live) {
      head.last = this.#answer(head, branch, head.position);
      head.live = new Live(head.last, null);
      this.live.set(head.last.id, head.live);
      this.version.value += 1;
    }
    head.position = position;
    head.live.add({ text, cut: 0, position });
    return undefined;
  }
}

/** A message as it was known, without what the server tells. */
function blank(known, id) {
  return { id, created: known.get(id)?.created ?? Date.now() + known.size, state: "done" };
}

/** What a turn of the server's tree says; null where only the template wrote. */
function read({ kind, role, text = "", start, end, op, messages }) {
  if (kind === "output") return { role: "assistant", text, start, end, op };
  const said = messages?.at(-1);
  if (said?.role === "tool") return { role: "tool", text: said.content, results: messages.map(({ name, content }) => ({ name: name ?? "tool", text: content })), start, end, op };
  if (said) return { role: said.role === "assistant" ? "assistant" : "user", text: said.content ?? "", system: messages.find((each) => each.role === "system" && each !== said)?.content, start, end, op };
  if (role === "assistant") return null;
  const plain = text.replace(MARKS, "").replace(/^\s*(system|user|tool)\s*\n/, "").trim();
  return plain ? { role: "user", text: plain, start, end, op } : null;
}

function parentsFirst(branches) {
  const byName = new Map(branches.map((each) => [each.branch, each]));
  const done = new Set();
  const order = [];
  for (const each of branches) {
    const chain = [];
    for (let at = each; at && !done.has(at.branch); at = byName.get(at.parent)) {
      done.add(at.branch);
      chain.push(at);
    }
    order.push(...chain.reverse());
  }
  return order;
}
