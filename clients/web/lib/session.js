/**
 * What a program holds of a session: `connect`, `Session`.
 *
 *     import { connect } from "ramify-client";
 *     const session = connect("ws://127.0.0.1:8765");
 *     for await (const { text } of session.main.chat("Tell me a story.")) console.log(text);
 *     await session.close();
 *
 * Ops that are called in one turn of the event loop travel in one frame, so they are a program: append, fork,
 * generate on the children. What messages mean is in `core.js`, sockets are in `link.js`.
 */

import { fromBase64, toBase64 } from "./base64.js";
import { Branch } from "./branch.js";
import { Core } from "./core.js";
import { BadRequest, Cancelled, Conflict, ConnectionLost, Internal, RamifyError, errorOf } from "./errors.js";
import { branchesOf } from "./frames.js";
import { Generation } from "./generation.js";
import { Link, websocketUrl } from "./link.js";
import { wholeTree } from "./tree.js";

/** @import { NewOp, Sendable } from "./core.js" */
/** @import { LinkOptions, Status, StatusChange } from "./link.js" */
/** @import { ChatMessage, DeltaMessage, ErrorMessage, EventMessage, GenerateFields, JoinFields, KvHints, Note, OkMessage, OpenFields,
 *    PruneFields, SelectFields, StateMessage } from "./protocol.js" */
/** @import { Ticket, Stream } from "./stream.js" */

const TREE_TRIES = 5; // a tree that does not fit into one answer may change between two
const MOST_PAGES = 1 << 14; // of one tree
const CLOSE_MS = 5_000; // how long `close` waits for the server's answer
const NOTES = 1024; // kept for a reader of `events`; older ones are dropped
const KINDS = /** @type {const} */ (["regex", "json_schema", "choices", "grammar", "continue_constraint"]);

/**
 * @typedef {object} SessionOptions
 * @property {string} [client]  a name that stays the same across reconnects; default: a random one
 * @property {string} [session]  with `key`: a session that exists
 * @property {string} [key]  its key, or its view key
 * @property {Uint8Array} [import]  a new session that is what `export` wrote, of this server or another one with the same
 *   model; what `storage` kept is not used then
 * @property {Storage | null} [storage]  where client, session and key are kept, so that a page that is loaded again
 *   comes back (sessionStorage: another tab does not share them); default: nowhere
 * @property {OpenFields} [open]  more fields of `open`: detach, tick_ms, ttl_s, template, tools, parts, tokens, model
 *
 * @typedef {SessionOptions & LinkOptions} Options
 *
 * @typedef {object} Shown
 * @property {(Uint8Array | string)[]} [images]  files of pictures (PNG, JPEG, WebP, GIF): bytes, or base64
 *
 * @typedef {object} Abortable
 * @property {AbortSignal} [signal]  cancels the op, which then rejects with the signal's reason
 *
 * @typedef {object} Short  A constraint in short: one of these.
 * @property {string} [regex]
 * @property {object | string} [json_schema]
 * @property {string[]} [choices]
 * @property {string} [grammar]
 * @property {boolean} [continue_constraint]  true: go on with the constrained output that the branch ends in (as where
 *   no constraint is given), or fail; false: the output is free
 */

/**
 * @typedef {object} SessionEvents  What the `detail` of each event is.
 * @property {StatusChange} status
 * @property {StateMessage} state  the answer to an `open`
 * @property {EventMessage} tree  another client changed it
 * @property {DeltaMessage} text  of a generation that was not started here
 * @property {RamifyError} lost  the server has forgotten the session and `renew` is set: all branches are gone, a new one
 *   is being opened; ops called from the handler run in it
 *
 * @typedef {{[Name in keyof SessionEvents]: CustomEvent<SessionEvents[Name]> & {type: Name}}} Told
 * @typedef {Told[keyof Told]} SessionEvent  Any of them: `type` tells which.
 *
 * @typedef {Pick<EventTarget, "dispatchEvent"> & {
 *   addEventListener<Name extends keyof Told>(type: Name, listener: ((event: Told[Name]) => void) | {handleEvent(event: Told[Name]): void} | null,
 *     options?: boolean | AddEventListenerOptions): void,
 *   removeEventListener<Name extends keyof Told>(type: Name, listener: ((event: Told[Name]) => void) | {handleEvent(event: Told[Name]): void} | null,
 *     options?: boolean | EventListenerOptions): void,
 * }} TellsEvents
 */

/** An `EventTarget` whose events are typed. @type {new () => TellsEvents} */
const Target = EventTarget;

/**
 * Connect: a new session, or with `session` and `key` (or what `storage` kept) one that exists. Returns at once; ops
 * wait for the connection. `await session.ready` for the errors of connecting.
 *
 * @param {string} url  `ws://host:port` or `http://host:port`; the path is `/v1/ws` unless there is one
 * @param {Options} [options]
 */
export function connect(url, options = {}) {
  return new Session(url, options);
}

/** A single-use token for `connect`, minted with a long-lived one. Throws RamifyError.
 *  @param {string | URL} base  `http(s)://host` @param {string} bearer @returns {Promise<string>} */
export async function mintToken(base, bearer) {
  const answer = await fetch(new URL("/v1/tokens", base), { method: "POST", headers: { Authorization: `Bearer ${bearer}` } });
  const body = await answer.json();
  if (!answer.ok) throw errorOf(body.code, body.message);
  return body.token;
}

/** A session. Its events are `SessionEvents`. */
export class Session extends Target {
  #core;
  #link;
  #storage;
  #place;
  /** @type {Sendable[] | null} ops of this turn of the event loop */ #pending = null;
  /** @type {WeakMap<Stream, Generation>} */ #generations = new WeakMap();
  /** @type {Note[]} */ #notes = [];
  /** @type {(() => void)[]} */ #readers = [];
  #made = 0; // names of branches
  #settle = { resolve: () => {}, reject: (/** @type {RamifyError} */ _) => {} };

  /** See `connect`. @param {string} url @param {Options} options */
  constructor(url, { client, session, key, import: file, storage = null, open = {}, ...options } = {}) {
    super();
    if (file && session !== undefined) throw new BadRequest("`import` makes a new session: give no `session` beside it");
    const address = websocketUrl(url);
    this.#storage = storage;
    this.#place = `ramify ${address}`;
    const kept = JSON.parse(storage?.getItem(this.#place) ?? "null");
    const same = kept && !file && (client === undefined || kept.client === client);
    const saved = session === undefined && same ? kept : { session, key };
    this.#core = new Core({ client: client ?? kept?.client ?? randomName(), ...open }, saved, file && toBase64(file));
    /**
     * Resolves with this session when it is attached for the first time; rejects with what prevented it.
     * @type {Promise<this>}
     */
    this.ready = new Promise((resolve, reject) => {
      this.#settle = { resolve: () => resolve(this), reject };
    });
    this.ready.catch(() => {}); // whoever awaits it is told
    this.#link = new Link(address, this.#core, options, {
      status: (change) => {
        if (change.status === "closed") this.#ended(change.error);
        this.#emit("status", change);
      },
      attached: (state) => {
        this.#save();
        this.#settle.resolve();
        this.#emit("state", state);
      },
      noted: (message) => this.#note(message),
      lost: (error) => this.#emit("lost", error),
    });
    /** The branch that every session has. */
    this.main = this.branch("main");
    queueMicrotask(() => this.#link.start());
  }

  /** This client's name in the session: give it to `connect` to come back as the same client. */
  get client() { return this.#core.opening.client; }
  /** With `key`, what another `connect` needs to attach to this session; undefined before it is attached. */
  get id() { return this.#core.session; }
  get key() { return this.#core.key; }
  /** A key to give away: it opens the session for reading. */
  get viewKey() { return this.#core.viewKey; }
  /** The last `state` that answered `open`; null before. */
  get state() { return this.#core.state; }
  /** @returns {Status} */
  get status() { return this.#link.status; }
  /** Why it is over; null while it lives. */
  get error() { return this.#core.error; }
  /** The served model's name. */
  get model() { return this.#core.state?.server?.model; }
  /** The server's limits, by name. */
  get limits() { return this.#core.limits; }
  /** The names of the tools in force: of `open.tools`, or what the session was opened with before. */
  get toolNames() { return this.#core.state?.tools ?? []; }
  /** What the server says about how the session was opened: a chat template that rewrites earlier turns. */
  get notes() { return this.#core.state?.notes ?? []; }
  /** The branches that this client knows of. @returns {Branch[]} */
  get branches() { return [...this.#core.heads.byName.keys()].map((name) => this.branch(name)); }

  /** A handle of a branch, whether it exists or not. @param {string} name */
  branch(name) {
    return new Branch(this, name);
  }

  /** A branch's length in tokens as far as this client has heard; undefined: it knows no such branch. @param {string} name */
  position(name) {
    return this.#core.heads.byName.get(name)?.position;
  }

  // --- ops ------------------------------------------------------------------------------------------

  /**
   * Add input: raw text, chat messages (through the model's template), or token ids. `expect`: only if the branch is
   * that long. `logprobs`: how many likely tokens to tell beside each appended one. `images`: files of pictures, each of
   * which stands where the text, or a message's content, has U+FFFC. Of several branches the replies are a list.
   *
   * @overload
   * @param {string | ChatMessage[] | number[]} input
   * @param {{branch?: string, expect?: number, logprobs?: boolean | number} & Shown & Abortable} [options]
   * @returns {Promise<OkMessage>}
   *
   * @overload
   * @param {string | ChatMessage[] | number[]} input
   * @param {{branch: string[], expect?: number, logprobs?: boolean | number} & Shown & Abortable} options
   * @returns {Promise<OkMessage[]>}
   *
   * @param {string | ChatMessage[] | number[]} input
   * @param {{branch?: string | string[], expect?: number, logprobs?: boolean | number} & Shown & Abortable} [options]
   * @returns {Promise<OkMessage | OkMessage[]>}
   */
  append(input, { branch = "main", expect, logprobs, images, signal } = {}) {
    const field = typeof input === "string" ? "text" : typeof input[0] === "number" ? "tokens" : "messages";
    const files = images?.map((each) => (typeof each === "string" ? each : toBase64(each)));
    return this.#send({ type: "append", branch, [field]: input, expect, logprobs: logprobs && Number(logprobs), images: files }, signal);
  }

  /**
   * Generate. An array where `branch` is a list or `n` is given. Other options: the fields of `generate`, and a
   * constraint in short (`regex`, `json_schema`, `choices` or `grammar`).
   *
   * @overload
   * @param {Omit<GenerateFields, "n" | "as"> & Short & Abortable & {branch?: string}} [options]
   * @returns {Generation}
   *
   * @overload
   * @param {GenerateFields & Short & Abortable & ({branch: string[]} | {n: number, branch?: string})} options
   * @returns {Generation[]}
   *
   * @param {GenerateFields & Short & Abortable & {branch?: string | string[]}} [options]
   * @returns {Generation | Generation[]}
   */
  generate({ branch = "main", signal, ...options } = {}) {
    const many = Array.isArray(branch) || options.n !== undefined;
    const names = options.n !== undefined && options.n > 1 && !options.as && !Array.isArray(branch);
    const as = names ? { as: this.freshNames(/** @type {string} */ (branch), options.n ?? 0) } : {};
    const all = this.#start({ type: "generate", branch, ...constrained(options), ...as }, signal);
    return many ? all : /** @type {Generation} */ (all[0]);
  }

  /**
   * Append the likeliest of several texts. Its result has `text`, `choice` (its index) and `scores`. An array where
   * `branch` is a list.
   *
   * @overload
   * @param {string[]} choices
   * @param {SelectFields & Abortable & {branch?: string}} [options]
   * @returns {Generation}
   *
   * @overload
   * @param {string[]} choices
   * @param {SelectFields & Abortable & {branch: string[]}} options
   * @returns {Generation[]}
   *
   * @param {string[]} choices
   * @param {SelectFields & Abortable & {branch?: string | string[]}} [options]
   * @returns {Generation | Generation[]}
   */
  select(choices, { branch = "main", signal, ...options } = {}) {
    const all = this.#start({ type: "select", branch, choices, ...options }, signal);
    return Array.isArray(branch) ? all : /** @type {Generation} */ (all[0]);
  }

  /** Children named `as` at the head of `branch`, or at position `at`; `branch` null: new roots.
   *  @param {string[]} as @param {{branch?: string | null, at?: number} & Abortable} [options]
   *  @returns {Promise<OkMessage>} */
  fork(as, { branch = "main", at, signal } = {}) {
    return this.#one({ type: "fork", branch, as, at }, signal);
  }

  /** Move the head back: `to` a position, or by `turns` appended turns.
   *  @param {{branch?: string, to?: number, turns?: number} & Abortable} where @returns {Promise<OkMessage>} */
  rollback({ branch = "main", to, turns, signal }) {
    return this.#one({ type: "rollback", branch, to, turns }, signal);
  }

  /** Stop generations on branches, or ops by id; without both: all of this session's. `subtree`: with all that was
   *  forked off the branches, and every op that waits there.
   *  @param {{branch?: string | string[], ops?: number[], subtree?: boolean}} [what] @returns {Promise<OkMessage>} */
  cancel({ branch, ops, subtree } = {}) {
    return this.#one({ type: "cancel", branch, ops, subtree });
  }

  /** What the branches `from` generated last becomes input of `branch`; then they are dropped.
   *  @param {string[]} from @param {JoinFields & Abortable & {branch?: string}} [options] @returns {Promise<OkMessage>} */
  join(from, { branch = "main", signal, ...options } = {}) {
    return this.#one({ type: "join", from, branch, ...options }, signal);
  }

  /** Keep the best of the branches `from`, once their generations have ended, and drop the others. The reply's
   *  `result` has `kept`, `dropped` and `scores`. `into`: names for the winners, the best first.
   *  @param {string[]} from
   *  @param {PruneFields & Abortable & {into?: string | string[], score_from?: string[]}} [options]
   *  @returns {Promise<OkMessage>} */
  prune(from, { signal, ...options } = {}) {
    return this.#one({ type: "prune", from, ...options }, signal);
  }

  /** The branches as the server sees them, or one; `text` and `tokens` add their turns.
   *  @param {{branch?: string, text?: boolean, tokens?: boolean} & Abortable} [options]
   *  @returns {Promise<StateMessage>} */
  async tree({ branch, text, tokens, signal } = {}) {
    const ask = (/** @type {object} */ more) =>
      /** @type {Promise<StateMessage>} */ (/** @type {unknown} */ (this.#one({ type: "tree", branch, text, tokens, ...more }, signal)));
    for (let tries = 0; tries < TREE_TRIES; tries += 1) {
      let last = await ask({});
      const pages = [last];
      while (last.next && last.revision === pages[0]?.revision) {
        if (pages.length > MOST_PAGES) throw new Internal("the server's answers to `tree` come to no end");
        last = await ask({ after: last.next });
        pages.push(last);
      }
      if (last.revision === pages[0]?.revision) return wholeTree(pages);
    }
    throw new Conflict("the tree changes faster than it can be shown: ask for one branch of it");
  }

  /** Rename a branch, keep its KV warm, or attach a JSON object; without `branch`: to the session.
   *  @param {{branch?: string, name?: string, retain_s?: number, persist?: "none" | "lazy" | "sync", meta?: Record<string, unknown>,
   *    hints?: KvHints} & Abortable} fields @returns {Promise<OkMessage>} */
  set({ signal, ...fields }) {
    return this.#one({ type: "set", ...fields }, signal);
  }

  /** The session as one file, with all its branches: `connect(url, { import: file })` makes a new one of it. Rejects with
   *  Conflict while ops run, LimitExceeded if it does not fit into a frame.
   *  @param {Abortable} [options] @returns {Promise<Uint8Array<ArrayBuffer>>} */
  async export({ signal } = {}) {
    return fromBase64((await this.#one({ type: "export" }, signal)).result?.file);
  }

  /** Release a branch, or a list of them. @param {string | string[]} branch @param {Abortable} [options]
   *  @returns {Promise<OkMessage | OkMessage[]>} */
  drop(branch, { signal } = {}) {
    return this.#send({ type: "drop", branch }, signal);
  }

  /** Flow control: let the server deliver text of a branch up to this position. @param {string} branch @param {number} upto */
  credit(branch, upto) {
    this.#core.credit(branch, upto);
    queueMicrotask(() => this.#link.pump());
  }

  /**
   * Ops that go out in one frame or not at all: those that `queue` calls. Without it, ops of one turn of the event
   * loop go out together as far as the server's limits allow. Returns what `queue` returns.
   *
   * @template T @param {() => T} queue @returns {T}
   */
  frame(queue) {
    this.#flush();
    this.#pending = [];
    try {
      return queue();
    } finally {
      const frame = this.#pending;
      this.#pending = null;
      if (frame.length) this.#core.submit(frame, true);
      queueMicrotask(() => this.#link.pump());
    }
  }

  /**
   * A program as it is on the wire: ops without ids, in one frame. For each: its Generation (a list for several
   * branches), or the promise of its reply.
   *
   * @param {NewOp[]} ops
   * @returns {(Promise<OkMessage | OkMessage[]> | Generation | Generation[])[]}
   */
  send(ops) {
    return this.frame(() =>
      ops.map((op) => {
        if (op.type !== "generate" && op.type !== "select") return this.#send(op);
        const all = this.#start(op);
        return all.length === 1 ? /** @type {Generation} */ (all[0]) : all;
      }));
  }

  /** Generations under way: those of this session, and those that went on while a page was loaded again.
   *  @returns {Generation[]} */
  running() {
    return this.#core.running().map(({ ticket, stream }) => this.#generation(ticket, stream));
  }

  /** What others do to the session, and their text, as it comes. The last 1,024 wait for the reader.
   *  @returns {AsyncGenerator<Note, void, void>} */
  async *events() {
    for (;;) {
      for (let note = this.#notes.shift(); note; note = this.#notes.shift()) yield note;
      if (this.error) return;
      await /** @type {Promise<void>} */ (new Promise((resolve) => this.#readers.push(resolve)));
    }
  }

  /** End the session on the server (`keep`: only leave it), and here. Never rejects. @param {{keep?: boolean}} [options]
   * @returns {Promise<boolean>} whether the server has confirmed it: if not, it may still keep the session */
  async close({ keep = false } = {}) {
    let told = false;
    if (!keep) this.#storage?.removeItem(this.#place);
    if (this.#core.open) {
      let timer;
      const late = new Promise((resolve) => { timer = setTimeout(resolve, CLOSE_MS, false); });
      told = await Promise.race([this.#one({ type: "close", keep }).then(() => true, () => false), late]);
      clearTimeout(timer);
    }
    this.#link.end(new ConnectionLost("the session was closed"));
    return told;
  }

  /** Try again now instead of waiting. */
  reconnect() {
    this.#link.reconnect();
  }

  /** Names for children that nobody has. The client's name is in them: others may fork the same branch.
   *  @param {string} parent @param {number} count @returns {string[]} */
  freshNames(parent, count) {
    const tag = this.client.slice(-6).replaceAll(/[^A-Za-z0-9]/g, "");
    const names = [];
    while (names.length < count) {
      const name = `${parent.slice(-40)}.${tag}${++this.#made}`;
      if (this.position(name) === undefined) names.push(name);
    }
    return names;
  }

  /** For `Generation.cancel`. @param {Ticket} ticket @param {string} branch @returns {Promise<void>} */
  async withdraw(ticket, branch) {
    this.#flush();
    if (this.#core.withdraw([ticket], new Cancelled("the generation was cancelled before it was sent"))) return;
    const alone = ticket.streams.size === 1 && ticket.id !== undefined && !ticket.adopted;
    await this.cancel(alone ? { ops: [/** @type {number} */ (ticket.id)] } : { branch });
  }

  // ---

  /** @param {NewOp} fields @param {AbortSignal} [signal] */
  #start(fields, signal) {
    const ticket = this.#submit(fields, signal);
    return [...ticket.streams.values()].map((stream) => this.#generation(ticket, stream));
  }

  /** @param {Ticket} ticket @param {Stream} stream */
  #generation(ticket, stream) {
    let generation = this.#generations.get(stream);
    if (!generation) this.#generations.set(stream, (generation = new Generation(this, ticket, stream)));
    return generation;
  }

  /** @param {NewOp} fields @param {AbortSignal} [signal] @returns {Promise<OkMessage>} */
  async #one(fields, signal) {
    return /** @type {OkMessage} */ (await this.#send(fields, signal));
  }

  /** @param {NewOp} fields @param {AbortSignal} [signal] @returns {Promise<OkMessage | OkMessage[]>} */
  async #send(fields, signal) {
    const ticket = this.#submit(fields, signal);
    await /** @type {Promise<void>} */ (new Promise((resolve) => {
      if (ticket.settled) resolve();
      else ticket.onsettled = resolve;
    }));
    if (ticket.error) throw ticket.error;
    const replies = /** @type {OkMessage[]} */ (ticket.replies);
    return replies.length > 1 ? replies : /** @type {OkMessage} */ (replies[0]);
  }

  /** @param {NewOp} fields @param {AbortSignal} [signal] */
  #submit(fields, signal) {
    if (signal?.aborted) {
      const ticket = this.#core.ticket(fields, []);
      ticket.fail(signal.reason);
      return ticket;
    }
    if (!this.#pending) {
      this.#pending = [];
      queueMicrotask(() => {
        this.#flush();
        this.#link.pump();
      });
    }
    const ticket = this.#core.ticket(fields, this.#pending);
    if (signal) {
      const abort = () => this.#abort(ticket, signal.reason);
      signal.addEventListener("abort", abort);
      ticket.release = () => signal.removeEventListener("abort", abort);
    }
    return ticket;
  }

  /** @param {Sendable} ticket @param {unknown} reason */
  #abort(ticket, reason) {
    if (ticket.settled) return;
    const error = /** @type {RamifyError} */ (reason); // what a signal is aborted with is what the caller wants to see
    this.#flush();
    if (this.#core.withdraw([ticket], error)) return;
    const many = ticket.streams.size > 1;
    const branch = branchesOf(ticket.op);
    this.cancel(many ? { branch } : { ops: [/** @type {number} */ (ticket.id)] }).catch(() => {});
    ticket.abandon(error);
  }

  #flush() {
    const frame = this.#pending;
    this.#pending = null;
    if (frame?.length) this.#core.submit(frame);
  }

  /** @param {Note} message */
  #note(message) {
    this.#notes.push(message);
    if (this.#notes.length > NOTES) this.#notes.shift();
    for (const wake of this.#readers.splice(0)) wake();
    if (message.type === "event") this.#emit("tree", message);
    else if (message.type === "delta") this.#emit("text", message);
  }

  /** @param {RamifyError} [error] */
  #ended(error) {
    this.#flush();
    for (const wake of this.#readers.splice(0)) wake();
    if (error) this.#settle.reject(error);
  }

  #save() {
    const { session, key } = this.#core;
    this.#storage?.setItem(this.#place, JSON.stringify({ client: this.client, session, key }));
  }

  /** @template {keyof SessionEvents} Name @param {Name} name @param {SessionEvents[Name]} detail */
  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/** The fields of `generate`, where a constraint may be said in short. @param {GenerateFields & Short} options
 *  @returns {GenerateFields} */
function constrained({ regex, json_schema: schema, choices, grammar, continue_constraint: goesOn, ...fields }) {
  const given = { regex, json_schema: schema, choices, grammar, continue_constraint: goesOn };
  const kinds = KINDS.filter((kind) => given[kind] !== undefined);
  const [kind] = kinds;
  if (kind === undefined) return fields;
  if (kinds.length > 1 || fields.constraint) throw new BadRequest(`give one constraint, not ${[...kinds, ...(fields.constraint ? ["constraint"] : [])].join(", ")}`);
  return { ...fields, constraint: goesOn === undefined ? { [kind]: given[kind] } : { continue: goesOn } };
}

/** 96 random bits; `crypto.randomUUID` is missing on pages without TLS. */
function randomName() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `js-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
