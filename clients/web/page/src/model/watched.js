/**
 * A chat that somebody else writes, watched with its view key: the server's tree and its deltas, nothing of one's own.
 * Has what of a `Chat` the page reads.
 */

import { signal } from "@preact/signals";
import { connect } from "../../../lib/index.js";
import { messagesOf } from "./branches.js";
import { t } from "../strings.js";
import { Live } from "./live.js";
import { Tree, brief } from "./tree.js";

const SOON_MS = 60; // changes that come together are looked up once

export class Watched {
  #session;
  #asked = null;
  /** @type {Map<string, {position: number, last: object | null, live: Live | null}>} branch -> where its text is */ #heads = new Map();

  /** @param {{session: string, key: string, connection: {url: string, token?: Function}}} parts */
  constructor({ session, key, connection: { url, token } }) {
    this.watching = true;
    this.id = `watch ${session}`;
    this.record = { title: t.watchedChat };
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
    this.notice.value = { text: t.cannotWatch };
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
    const { messages, ends } = messagesOf(state.branches, known);
    const heads = new Map(state.branches.map(({ branch, position, running, started_at: at }) => [branch, { position, last: ends.get(branch), live: null, running: running !== undefined, at }]));
    const first = this.tree.chosen;
    for (const message of messages) message.chosen = chosen.get(message.id);
    this.tree = new Tree(messages, first);
    for (const [name, head] of heads) this.#goOn(name, head);
    for (const id of this.live.keys()) if (![...heads.values()].some(({ live }) => live?.message.id === id)) this.live.delete(id);
    this.#heads = heads;
    const newest = heads.get(this.newest)?.last;
    if (newest) this.tree.choose(newest);
    const title = messages.find(({ role }) => role === "user");
    if (title) this.record.title = brief(title.text, 60);
    this.version.value += 1;
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
