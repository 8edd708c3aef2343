/**
 * One chat: its tree of messages, and the session on the server that computes it.
 *
 * The text here is the truth for what was said; the server's branches are where it has been computed. `place`
 * says where a message is there. Whoever wants to go on from a message calls `#reach`, which gives a branch
 * that ends with it: its own, a fork, or, where the server has lost the session, one that is built from the text.
 */

import { signal } from "@preact/signals";
import { ConnectionLost, SessionLost, connect } from "../../../lib/index.js";
import { t } from "../strings.js";
import { Live } from "./live.js";
import { asMessages, brief, picturesOf, Tree } from "./tree.js";

export const TTL_S = 21_600; // how long the server shall keep a session that nobody looks at; it may keep it shorter
const TICK_MS = 30; // deltas come in frames, one in so many milliseconds
const SAVE_MS = 1_000; // of text that is being written
const EFFORTS = ["low", "medium", "high"]; // that a chat template can be told
const PAST = ["cancelled", "no_session", "skipped"]; // errors that tell a user nothing new

export class Chat {
  #store;
  #connection;
  #session = null;
  #dirty = new Set();
  #saving = null;
  #due = Infinity; // when the next save is
  #waiting = new Map(); // message -> the promise of its place
  #ahead = null; // what is being typed, on a branch of its own

  /**
   * @param {{record: object, messages?: object[], store: import("./store.js").Store, connection: {url: string, token?: Function}}} parts
   */
  constructor({ record, messages = [], store, connection }) {
    this.record = record;
    this.#store = store;
    this.#connection = connection;
    this.tree = new Tree(messages, record.chosen);
    /** @type {Map<string, Live>} message id -> the answer that is being written */ this.live = new Map();
    /** Read it to be told of every change but the text of answers that are being written. */
    this.version = signal(0);
    this.status = signal({ status: "idle" });
    /** What is being typed as the server has it already: its text, and how many tokens that are; null: nothing. */
    this.typed = signal(null);
    /** What went wrong or is worth a word. @type {import("@preact/signals").Signal<{text: string, mild?: boolean} | null>} */
    this.notice = signal(null);
  }

  get id() { return this.record.id; }
  get session() { return this.#session; }
  get busy() { return this.live.size > 0; }
  /** A link with which others may watch, not write; undefined before the server has answered. */
  get viewLink() {
    const { id, viewKey } = this.#session ?? {};
    return id && viewKey ? `${location.origin}${location.pathname}#watch=${encodeURIComponent(`${id} ${viewKey}`)}` : undefined;
  }

  get limits() { return this.#session?.state?.limits; }

  // --- connection ------------------------------------------------------------------------------------

  /** Connect, or come back to the chat's session. */
  open() {
    if (this.#session && this.#session.status !== "closed") return;
    if (!this.record.session) this.record.epoch += 1;
    const { url, token } = this.#connection;
    const { effort } = this.record.own ?? {};
    this.#session = connect(url, {
      token, client: this.record.client, storage: this.#storage(), retry: "always", renew: true,
      open: { tick_ms: TICK_MS, ttl_s: TTL_S, ...(this.record.tools?.length && { tools: this.record.tools }), ...(EFFORTS.includes(effort) && { effort }) },
    });
    const mine = this.#session;
    const on = (name, action) => mine.addEventListener(name, ({ detail }) => { if (this.#session === mine) action(detail); });
    on("status", (status) => {
      const { error } = status;
      if (status.status === "closed" && (error?.details?.close === 1000 || error instanceof SessionLost)) this.#endedElsewhere();
      else this.status.value = status;
    });
    on("state", (state) => this.#attached(state));
    on("lost", () => this.#lost());
    this.status.value = { status: mine.status };
  }

  /** Leave the session; what runs there goes on. */
  async leave() {
    const session = this.#session;
    this.#session = null;
    this.live.clear();
    this.status.value = { status: "idle" };
    await session?.close({ keep: true });
    await this.flush();
  }

  /** End the session on the server. */
  async end() {
    const session = this.#session;
    this.#session = null;
    this.live.clear();
    await session?.close();
    Object.assign(this.record, { session: undefined, key: undefined });
  }

  /**
   * The session as a file that another server opens: all messages but the deleted ones. What the server does not have
   * is told first. Rejects with what prevents it.
   */
  async exported() {
    if (this.busy) throw Object.assign(new Error(t.exportLater), { code: "conflict" });
    this.#dropAhead();
    const shown = this.tree.subtree(null);
    for (const message of shown) {
      await this.#known(message);
      if (!this.#valid(message.place)) this.#say(message);
    }
    await Promise.all(this.#waiting.values());
    await Promise.all([...this.#withoutDeleted(new Set(shown)), this.#session.set({ meta: { title: this.record.title } })]);
    return this.#session.export();
  }

  /** Take messages that are not `shown` off the server. @returns {Promise<unknown>[]} */
  #withoutDeleted(shown) {
    const placed = [...this.tree.messages.values()].filter(({ place }) => this.#valid(place));
    const deleted = placed.filter((each) => !shown.has(each));
    const names = new Set(deleted.map(({ place }) => place.branch));
    for (const each of deleted) each.place = null; // should one be shown again, it is told again
    this.#touch(deleted);
    return [...names].map((branch) => {
      const to = Math.max(0, ...placed.filter(({ place }) => place?.branch === branch).map(({ place }) => place.at));
      return to || branch === "main" ? this.#session.rollback({ branch, to }) : this.#session.drop(branch);
    });
  }

  reconnect() { this.#session?.reconnect(); }

  /** The library's storage, kept in the chat's record. */
  #storage() {
    return {
      getItem: () => {
        const { client, session, key, op } = this.record;
        return session ? JSON.stringify({ client, session, key, op }) : null;
      },
      setItem: (_, text) => {
        const { session, key, op } = JSON.parse(text);
        const news = session !== this.record.session;
        Object.assign(this.record, { session, key, op });
        this.#touch([], news ? 0 : 300);
      },
      removeItem: () => {},
    };
  }

  /** Connected: go on with what runs, and look up what ended meanwhile. */
  async #attached({ server, lost }) {
    if (this.record.server && server && server.epoch !== this.record.server) {
      for (const message of this.#unfinished()) if (message.role === "assistant") message.outage = true; // its time is not the model's
    }
    this.record.server = server?.epoch;
    if (lost) await this.#verify();
    for (const generation of this.#session.running()) {
      const message = this.#unfinished().find(({ role, place }) => role === "assistant" && place.branch === generation.branch);
      if (message && !this.live.has(message.id)) this.#follow(message, generation);
    }
    const unknown = this.#unfinished().filter((each) => !this.live.has(each.id) && !this.#waiting.has(each.id));
    if (unknown.length) await this.#lookUp(unknown);
    this.#changed();
  }

  /** Messages of this session that had no answer when the page was left. */
  #unfinished() {
    return [...this.tree.messages.values()].filter(({ place, state }) =>
      place?.epoch === this.record.epoch && (place.at === undefined || state === "running"));
  }

  /** Find out from the server's tree what became of messages. */
  async #lookUp(messages) {
    const state = await this.#session.tree({ text: true }).catch((error) => this.#fail(error));
    if (!state) return;
    const branches = new Map(state.branches.map((each) => [each.branch, each]));
    for (const message of messages) {
      const branch = branches.get(message.place.branch);
      const turns = branch?.turns ?? [];
      const first = turns.findIndex((turn) => isOf(turn, message));
      if (first < 0) this.#unplace(message);
      else {
        let last = first;
        while (turns[last + 1]?.op === turns[first].op) last += 1;
        message.place.at = turns[last].end;
        if (message.role === "assistant") {
          message.text = (message.before ?? "") + turns.slice(first, last + 1).map(({ text }) => text).join("");
          message.start = turns[first].start;
          message.reason = last === turns.length - 1 ? branch.reason : "interrupted";
        }
      }
      if (message.state === "running") message.state = "done";
      this.#touch([message]);
    }
  }

  /** The server restarted without what came last: what it has no more is told again once it is needed. */
  async #verify() {
    const state = await this.#session.tree({ text: true }).catch((error) => this.#fail(error));
    if (!state) return;
    const branches = new Map(state.branches.map((each) => [each.branch, each.turns ?? []]));
    const gone = [...this.tree.messages.values()].filter(({ place, op }) => this.#valid(place) && place.at !== undefined
      && !branches.get(place.branch)?.some((turn) => turn.op === op && turn.end === place.at));
    for (const message of gone) message.place = null;
    this.#touch(gone);
  }

  #unplace(message) {
    message.place = null;
    if (message.role === "assistant") message.reason = "interrupted";
  }

  /** Another page has ended the session: a new one takes its place. */
  #endedElsewhere() {
    Object.assign(this.record, { session: undefined, key: undefined });
    this.#session = null;
    this.open();
    this.#lost();
  }

  /** The server does not know the session any more: build what is shown again from the text. */
  #lost() {
    const cut = this.#unfinished();
    this.record.epoch += 1;
    this.#waiting.clear();
    for (const message of cut) {
      const live = this.live.get(message.id);
      if (live) message.text = live.text;
      message.place = null;
      if (message.role === "assistant") Object.assign(message, { state: "done", reason: "interrupted" });
    }
    this.live.clear();
    this.#touch(cut);
    const path = this.tree.path();
    const end = path.findLast(({ text, role }) => role !== "assistant" || text);
    if (end) {
      this.#reach(end);
      this.notice.value = { mild: true, text: t.sentAgain };
    }
    this.#changed();
  }

  // --- what the user does ------------------------------------------------------------------------------

  /**
   * A new message, and answers to it. `after`: the message that it goes on from (null: none; default: the last shown).
   * @param {{text: string, files?: object[], system?: string, after?: object | null, count?: number, options?: object, merged?: string[]}} what
   */
  send({ text, files, system, after = this.tree.path().at(-1) ?? null, count = 1, options = {}, merged }) {
    const message = this.tree.add({
      parent: after?.id ?? null, role: "user", text, ...(files?.length && { files }),
      ...(system && !after && { system }), ...(merged && { merged }), ...(count > 1 && { compare: true }),
    });
    if (!this.record.named && this.tree.size === 1) this.record.title = brief(text || files?.[0]?.name || "", 60) || t.newChat;
    this.record.updated = Date.now();
    this.#takeAhead(message);
    this.#touch([message], 0);
    this.answer(message, { count, options });
    return message;
  }

  /** Change a message: a sibling with the new text. */
  edit(message, text, { count, options } = {}) {
    return this.send({ text, files: message.files, system: message.system, after: this.tree.parent(message), count, options });
  }

  /** Results of tools, as a message of their own. */
  tell(results, after, { options = {} } = {}) {
    const message = this.tree.add({ parent: after.id, role: "tool", text: results.map(({ text }) => text).join("\n"), results });
    this.answer(message, { options });
  }

  /** `count` answers to a message, side by side; those that are there stay. */
  async answer(message, { count = 1, options = {} } = {}) {
    try {
      await this.#known(message);
      const used = this.tree.children(message).some(({ place }) => place?.branch === message.place?.branch && this.#valid(place));
      const branches = count === 1 && !used ? [this.#reach(message)] : this.#fork(message, count);
      const made = this.#session.generate({ ...options, branch: branches });
      const answers = made.map((_, i) => this.tree.add({
        parent: message.id, role: "assistant", text: "", state: "running", ...(options.constraint?.json_schema && { json: true, schema: options.constraint.json_schema }), place: { epoch: this.record.epoch, branch: branches[i] },
      }));
      if (count > 1) this.tree.choose(answers[0]);
      this.#touch([message, ...answers], 0);
      made.forEach((generation, i) => this.#follow(answers[i], generation));
      this.#changed();
      return answers;
    } catch (error) {
      this.#fail(error);
      return [];
    }
  }

  retry(answer, more) { return this.answer(this.tree.parent(answer), more); }

  /** An answer as a person has corrected it: a sibling, which the model takes for its own words when the chat goes on. */
  correct(answer, text) {
    const message = this.tree.add({ parent: answer.parent, role: "assistant", text, ...(answer.json && { json: true, schema: answer.schema }), corrected: true });
    this.#touch([message, this.tree.parent(message)], 0);
    this.#changed();
  }

  /** Go on with an answer that was cut: its text grows, under the constraint that it began under (which the server knows). */
  async goOn(answer, { options: { constraint: _, ...options } = {} } = {}) {
    const before = answer.text;
    await this.#known(answer);
    const copied = this.tree.children(answer).length > 0 || !this.#head(answer);
    const [branch] = copied ? this.#fork(answer, 1) : [this.#reach(answer)];
    const generation = this.#session.generate({ ...options, branch });
    const message = copied ? this.tree.add({ parent: answer.parent, role: "assistant", text: before, state: "running" }) : answer;
    Object.assign(message, { state: "running", op: undefined, place: { epoch: this.record.epoch, branch }, reason: undefined, before });
    this.#touch([message]);
    this.#follow(message, generation, before);
    this.#changed();
  }

  /** Stop answers, or all that run. */
  stop(messages = [...this.live.values()].map(({ message }) => message)) {
    const branch = messages.filter(({ id }) => this.live.has(id)).map(({ place }) => place.branch);
    if (branch.length) this.#session.cancel({ branch }).catch((error) => this.#fail(error));
  }

  /**
   * Bring drafts together: what they say becomes one message behind their question, and is answered.
   * The server joins the branches, so no text of theirs is sent.
   */
  async merge(drafts, { prefix, each, suffix, options = {} }) {
    const question = this.tree.parent(drafts[0]);
    try {
      for (const draft of drafts) await this.#known(draft);
      const ends = drafts.map((draft) => (this.#head(draft) ? draft.place.branch : null));
      if (ends.includes(null)) throw Object.assign(new Error(t.cannotMerge), { code: "bad_request" });
      await this.#known(question);
      const [branch] = this.#fork(question, 1);
      const joined = this.#session.join(ends, { branch, prefix, each, suffix, keep: true });
      const said = drafts.map(({ text }, i) => each.replace("{i}", i + 1).replace("{text}", () => text)).join("");
      const message = this.tree.add({
        parent: question.id, role: "user", text: `${prefix}${said}${suffix}`, merged: drafts.map(({ id }) => id),
        place: { epoch: this.record.epoch, branch },
      });
      this.#placing(message, joined);
      this.answer(message, { options });
    } catch (error) {
      this.#fail(error);
    }
  }

  /**
   * Let the model judge drafts: on a fork of each it is asked for a mark, and the marks are compared by the server.
   * @returns {Promise<object | undefined>} the best draft
   */
  async judge(drafts, { question, marks }) {
    try {
      for (const draft of drafts) await this.#known(draft);
      const sources = drafts.map((draft) => this.#fork(draft, 1)[0]);
      const judges = drafts.map((draft) => this.#fork(draft, 1)[0]);
      const session = this.#session;
      session.append([{ role: "user", content: question }], { branch: judges });
      const chosen = session.select(marks, { branch: judges });
      const pruned = session.prune(sources, { by: "number", score_from: judges, k: 1, keep: true });
      const { result } = await pruned;
      await Promise.all(chosen.map(({ result: each }) => each));
      session.drop([...sources, ...judges]).catch(() => {});
      drafts.forEach((draft, i) => { draft.score = result.scores[sources[i]]; });
      const best = drafts[sources.indexOf(result.kept[0].from)];
      if (drafts.filter(({ score }) => score === best.score).length === 1) this.choose(best);
      this.#touch(drafts);
      this.#changed();
      return best;
    } catch (error) {
      this.#fail(error);
      return undefined;
    }
  }

  /** Show a message (the arrows between siblings, the tree). */
  choose(message) {
    this.#touch(this.tree.choose(message), 0);
    this.#changed();
  }

  /** Hide a message and all below it, or show it again. */
  hide(message, gone = true) {
    if (gone) this.stop(this.tree.subtree(message));
    message.gone = gone;
    this.#touch([message]);
    this.#changed();
  }

  /** Show the answers to a question side by side, or the chosen one alone. */
  compare(question, on) {
    question.compare = on;
    this.#touch([question]);
    this.#changed();
  }

  rename(title) {
    Object.assign(this.record, { title: title.trim().slice(0, 200) || t.newChat, named: true });
    this.#touch();
    this.#changed();
  }

  /** Settings of this chat alone; `undefined` takes one back. */
  set(changes) {
    this.record.own = { ...this.record.own, ...changes };
    if ("effort" in changes && this.#session && !this.tree.size) this.end().then(() => this.open()); // templates are told as it opens
    this.#touch();
    this.#changed();
  }

  /** Before the chat begins: the tools that it has. @param {{tools: object[], mcp: object}} what */
  offer(what) {
    const { tools = [], mcp = {} } = this.record;
    if (JSON.stringify({ tools, mcp }) === JSON.stringify(what)) return;
    Object.assign(this.record, what);
    if (this.#session) this.end().then(() => this.open()); // tools are told as it opens
    this.#changed();
  }

  /** From now on a tool of an MCP server may be called in this chat without asking. */
  allow(name) {
    this.record.allowed = [...this.record.allowed ?? [], name];
    this.#touch();
  }

  /** An answer's calls were made: should the page be loaded again, they are not made by themselves. */
  asked(message) {
    message.asked = true;
    this.#touch([message], 0);
  }

  /** Keep what is in the message box. */
  keepDraft(text) {
    if (text === (this.record.draft ?? "")) return;
    this.record.draft = text;
    if (this.tree.size) this.#touch([], 400);
  }

  // --- typing ahead ---------------------------------------------------------------------------------------

  /**
   * Have the server compute a message while it is still being typed: it is appended to a branch of its own, and
   * rolled back when the text changes. What is sent unchanged is there already.
   */
  async typeAhead({ text, files, system }) {
    const after = this.tree.path().at(-1) ?? null;
    const message = { role: "user", text, ...(files?.length && { files }), ...(system && !after && { system }) };
    if (this.busy || this.#session?.status !== "open" || (after && (!this.#valid(after.place) || after.place.at === undefined))) return;
    if (this.#ahead?.after !== after || this.#ahead.epoch !== this.record.epoch) this.#dropAhead();
    if (this.#ahead?.waits || this.#ahead?.key === keyOf(message)) return;
    if (!text.trim() || picturesOf(message).length) return this.#dropAhead(); // pictures go once, with the message
    const base = after?.place.at ?? 0;
    try {
      if (this.#ahead) this.#session.rollback({ branch: this.#ahead.branch, to: base }).catch(() => {});
      const branch = this.#ahead?.branch ?? (after ? this.#fork(after, 1)[0] : this.#newRoot());
      const ahead = { branch, after, base, key: keyOf(message), epoch: this.record.epoch, waits: true };
      this.#ahead = ahead;
      ahead.done = this.#session.append(asMessages(message), { branch });
      const { position } = await ahead.done;
      ahead.waits = false;
      if (this.#ahead === ahead) this.typed.value = { text, tokens: position - base };
    } catch {
      this.#ahead = null; // too long, say: sending it tells
      this.typed.value = null;
    }
  }

  /** A message is sent: if it is the one that was typed ahead, it is on its branch. */
  #takeAhead(message) {
    const ahead = this.#ahead;
    if (!ahead) return;
    if (picturesOf(message).length || ahead.key !== keyOf(message) || ahead.epoch !== this.record.epoch || ahead.after !== this.tree.parent(message)) return this.#dropAhead();
    this.#ahead = null;
    this.typed.value = null;
    message.place = { epoch: this.record.epoch, branch: ahead.branch };
    this.#placing(message, ahead.done.then((ok) => {
      message.ahead = ok.position - ahead.base;
      return ok;
    }));
  }

  #dropAhead() {
    if (this.#ahead?.epoch === this.record.epoch) this.#session?.drop(this.#ahead.branch).catch(() => {});
    this.#ahead = null;
    this.typed.value = null;
  }

  // --- places on the server ------------------------------------------------------------------------------

  #valid(place) { return Boolean(place) && place.epoch === this.record.epoch; }

  /** Whether a message is the last one of its branch. */
  #head(message) {
    if (!this.#valid(message.place)) return false;
    return !this.#below(message).some(({ place }) => this.#valid(place) && place.branch === message.place.branch);
  }

  /** Children, those that were deleted too: they are still on the server. */
  #below(message) { return this.tree.below.get(message.id) ?? []; }

  /** Wait until a message can be forked: it is where its branch ends, or its position is known. */
  async #known(message) {
    while (message && this.#valid(message.place) && message.place.at === undefined && !this.#head(message)) {
      const pending = this.#waiting.get(message.id) ?? this.live.get(message.id)?.ended;
      if (!pending) break;
      await pending.catch(() => {});
    }
  }

  /** A branch that ends with this message. Ops that make it so go out with the frame. @returns {string} */
  #reach(message) {
    if (message === null) return this.#root();
    if (!this.#valid(message.place)) return this.#say(message);
    return this.#head(message) ? message.place.branch : this.#fork(message, 1)[0];
  }

  /** New branches behind a message. @returns {string[]} */
  #fork(message, count) {
    if (!this.#valid(message.place)) this.#say(message);
    const names = Array.from({ length: count }, () => this.#name());
    const { branch, at } = message.place;
    this.#session.fork(names, { branch, at }).catch((error) => this.#fail(error));
    return names;
  }

  /** An empty branch: the session's first one if nothing is on it. */
  #root() {
    const taken = [...this.tree.messages.values()].some(({ place }) => this.#valid(place) && place.branch === "main");
    const missing = this.#session.state && this.#session.position("main") === undefined; // a file's session may have none
    return taken || missing ? this.#newRoot() : "main";
  }

  #newRoot() {
    const name = this.#name();
    this.#session.fork([name], { branch: null }).catch((error) => this.#fail(error));
    return name;
  }

  /** Append a message behind its parent. @returns {string} the branch */
  #say(message) {
    const branch = this.#reach(this.tree.parent(message));
    message.place = { epoch: this.record.epoch, branch };
    const images = picturesOf(message);
    this.#placing(message, this.#session.append(asMessages(message), { branch, ...(images.length && { images }) }));
    return branch;
  }

  /** Note where a message is as soon as the server has said it. */
  #placing(message, answered) {
    const { place } = message;
    const placed = answered.then(({ id, position, result }) => {
      message.op = id;
      if (message.place !== place) return;
      place.at = position;
      if (result?.rebased !== undefined) this.#cutBack(place.branch, result.rebased, message);
    }).catch((error) => {
      if (message.place === place) message.place = null;
      this.#fail(error);
    }).finally(() => {
      this.#waiting.delete(message.id);
      this.#touch([message]);
      this.#changed();
    });
    this.#waiting.set(message.id, placed);
  }

  /** The template took back what it had put behind a message (its prompt for an answer). */
  #cutBack(branch, to, except) {
    for (const each of this.tree.messages.values()) {
      if (each !== except && this.#valid(each.place) && each.place.branch === branch && each.place.at > to) {
        each.place = null;
        this.#touch([each]);
      }
    }
  }

  #name() {
    this.record.names += 1;
    return `b${this.record.names}`;
  }

  // --- answers as they come --------------------------------------------------------------------------------

  async #follow(message, generation, before = "") {
    const live = new Live(message, generation, before);
    this.live.set(message.id, live);
    let saved = Date.now();
    try {
      for await (const delta of generation) {
        live.add(delta);
        if (Date.now() - saved > SAVE_MS) {
          saved = Date.now();
          message.text = live.text;
          this.#touch([message]);
        }
      }
      this.#ended(message, live, await generation.result);
    } catch (error) {
      if (this.live.get(message.id) !== live) return;
      if (error instanceof ConnectionLost) return this.#cut(message, live);
      if (error.done) this.#ended(message, live, error.done);
      Object.assign(message, { state: "failed", error: error.message });
      if (!error.done) {
        message.place = null;
        if (error.code === "cancelled") Object.assign(message, { state: "done", reason: "cancelled" });
      }
      this.#close(message, live);
    }
  }

  #ended(message, live, done) {
    if (this.live.get(message.id) !== live) return;
    message.text = live.before + done.text;
    message.op = done.id;
    Object.assign(message, { state: "done", reason: done.reason, error: done.message });
    if (done.usage) Object.assign(message, { usage: done.usage, start: done.usage.prompt });
    if (done.tool_calls?.length) message.calls = done.tool_calls.map(({ id, function: { name, arguments: args } }) => ({ id, name, arguments: args }));
    if (done.notes?.length) message.notes = done.notes;
    if (live.thoughtMs) message.thoughtMs = live.thoughtMs;
    if (this.#valid(message.place)) message.place.at = done.position;
    this.#close(message, live);
  }

  /** The connection ended for good: the answer may go on without us, and is looked up when we are back. */
  #cut(message, live) {
    message.text = live.text;
    this.live.delete(message.id);
    live.close();
    this.#touch([message]);
    this.#changed();
  }

  #close(message, live) {
    this.live.delete(message.id);
    live.close();
    this.record.updated = Date.now();
    this.#touch([message], 0);
    this.#changed();
  }

  // --- keeping ------------------------------------------------------------------------------------------------

  #fail(error) {
    if (PAST.includes(error.code) || error instanceof ConnectionLost) return;
    this.notice.value = { text: explain(error) };
  }

  #changed() { this.version.value += 1; }

  /** Save the record and some messages, soon. */
  #touch(messages = [], delay = 50) {
    for (const each of messages) this.#dirty.add(each);
    this.record.chosen = this.tree.chosen;
    const due = Date.now() + delay;
    if (due >= this.#due) return;
    this.#due = due;
    clearTimeout(this.#saving);
    this.#saving = setTimeout(() => this.flush(), delay);
  }

  /** Save now. */
  async flush() {
    clearTimeout(this.#saving);
    this.#due = Infinity;
    if (!this.tree.size) return; // a chat without messages is none
    const messages = [...this.#dirty];
    this.#dirty.clear();
    for (const each of messages) {
      const live = this.live.get(each.id);
      if (live) Object.assign(each, { text: live.text, op: live.generation.id });
    }
    await this.#store.save(this.record, messages).catch((error) => {
      for (const each of messages) this.#dirty.add(each);
      this.notice.value = { text: t.notSaved(error.message) };
    });
  }
}

/** What two messages have in common that are the same to the model. */
const keyOf = (message) => JSON.stringify(asMessages(message));

/** Whether a turn of the server's tree is this message. Ids of appends are not known before they are answered. */
function isOf(turn, message) {
  if (message.role === "assistant" || message.op !== undefined) return turn.op === message.op;
  return turn.kind === "input" && turn.messages?.at(-1).content === asMessages(message).at(-1).content;
}

/** What happened, and what to do. @param {{code?: string, message: string}} error */
export function explain({ code, message }) {
  const advice = {
    too_long: t.adviceTooLong,
    overloaded: t.adviceOverloaded,
    limit: t.adviceLimit,
    unauthorized: t.adviceUnauthorized,
    bad_constraint: t.adviceFormat,
    unsupported: t.adviceUnsupported,
    deadline: t.adviceDeadline,
  }[code];
  const said = message.endsWith(".") ? message : `${message}.`;
  return advice ? `${advice} (${said})` : `${said[0].toUpperCase()}${said.slice(1)}`;
}
