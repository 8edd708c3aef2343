/**
 * The browser client of `ramify.v1`: sessions that outlive their connection and a page refresh.
 *
 *     import { connect } from "ramify";
 *     const session = connect("ws://127.0.0.1:8765");
 *     session.append([{ role: "user", content: "Tell me a story." }]);
 *     for await (const { text } of session.generate({ max_tokens: 60 })) console.log(text);
 *
 * Ops that are called in one turn of the event loop travel in one frame, so they are a program:
 * append, fork, generate on the children. This file is the shell (socket, timers, storage); what the
 * messages mean is in `core.js`. It knows nothing of chats.
 */

import { Core } from "./core.js";
import { Generation, RamifyError } from "./stream.js";
import { wholeTree } from "./tree.js";

export { Generation, RamifyError };

const FIRST_DELAY_MS = 100;
const LAST_DELAY_MS = 10_000;
const RATE_DELAY_MS = 5_000; // at least this long after 4429
const OPEN_TIMEOUT_MS = 10_000;
const PING_EVERY_MS = 20_000;
const TREE_TRIES = 5; // a tree that does not fit into one answer may change between two
const PONG_WITHIN_MS = 10_000;

/** Close codes after which connecting again cannot help, with what they mean. */
const FINAL = {
  1000: ["closed", "the session was closed"],
  1002: ["bad_request", "the WebSocket protocol was violated"],
  1003: ["bad_request", "the server refused a frame of this type"],
  1007: ["bad_request", "the server read bad UTF-8"],
  4400: ["bad_request", "the server cannot parse this client's frames"],
  4401: ["unauthorized", "the token is missing, wrong or used up"],
  4403: ["forbidden", "the server does not allow this"],
  4409: ["replaced", "the same client connected again elsewhere"],
};

/**
 * @typedef {object} Options
 * @property {string} [client]  name that stays the same across reconnects; default: a random one, stored
 * @property {string | (() => Promise<string>)} [token]  a function is asked again for each connection
 * @property {Storage | null} [storage]  where the session's id and key are kept; default sessionStorage,
 *   which a refresh keeps and another tab does not share
 * @property {object} [open]  more fields of `open`: detach, tick_ms, ttl_s, template, tools
 * @property {typeof WebSocket} [WebSocket]
 */

/** Connect, or come back to the stored session. Returns at once; ops wait for the connection.
 *  @param {string} url  `ws://host:port` or `http://host:port`; the path is `/v1/ws` unless there is one
 *  @param {Options} [options] */
export function connect(url, options = {}) {
  return new Session(url, options);
}

/** The address of the WebSocket. @param {string} url @returns {string} */
function websocketUrl(url) {
  const parsed = new URL(url);
  parsed.protocol = parsed.protocol.replace("http", "ws");
  if (parsed.pathname === "/") parsed.pathname = "/v1/ws";
  return parsed.href;
}

/** A single-use token for `connect`, minted with a long-lived one. @param {string} base `http(s)://host` */
export async function mintToken(base, bearer) {
  const answer = await fetch(new URL("/v1/tokens", base), {
    method: "POST",
    headers: { Authorization: `Bearer ${bearer}` },
  });
  const body = await answer.json();
  if (!answer.ok) throw new RamifyError(body.code, body.message);
  return body.token;
}

/**
 * A session. Events: `status` (detail: status, retryAt, error), `state` (the answer to an `open`),
 * `tree` (another client changed it), `lost` (the server has forgotten the session: all branches are
 * gone, a new one is being opened; ops called from the handler run in it).
 */
export class Session extends EventTarget {
  #url;
  #options;
  #core;
  #storage;
  #socket = null;
  #open = false; // `state` is here: ops may be sent
  #frame = 0;
  #pending = null; // tickets of this turn of the event loop
  #attempt = 0;
  #floor = 0; // least delay before the next try
  #refusal = null;
  #timers = {};
  #generations = new WeakMap(); // stream -> Generation
  #stop = new AbortController();
  status = "connecting";

  /** @param {string} url @param {Options} options */
  constructor(url, options) {
    super();
    this.#url = websocketUrl(url);
    this.#options = options;
    this.#storage = options.storage === undefined ? globalThis.sessionStorage : options.storage;
    const saved = JSON.parse(this.#storage?.getItem(this.#place) ?? "null");
    const client = options.client ?? saved?.client ?? randomName();
    this.#core = new Core({ client, ...options.open }, saved?.client === client && saved.session ? saved : null);
    const listen = (target, name, action) => target?.addEventListener?.(name, action, { signal: this.#stop.signal });
    listen(globalThis, "online", () => this.reconnect());
    listen(globalThis, "offline", () => this.#lost("offline"));
    listen(globalThis.document, "visibilitychange", () => {
      if (globalThis.document.visibilityState === "visible") this.#awake();
    });
    this.#connect();
  }

  /** @returns {string} */
  get client() { return this.#core.opening.client; }
  /** The last `state` that answered `open`; null before. */
  get state() { return this.#core.state; }
  /** Branch name -> length in tokens. */
  position(branch) { return this.#core.heads.get(branch)?.position; }

  // --- ops ------------------------------------------------------------------------------------

  /** @param {string | object[]} input raw text, chat messages or token ids */
  append(input, { branch = "main", expect } = {}) {
    const field = typeof input === "string" ? "text" : typeof input[0] === "number" ? "tokens" : "messages";
    return this.#send({ type: "append", branch, [field]: input, expect });
  }

  /**
   * @param {object} options  fields of `generate`: branch, max_tokens, temperature, seed, n, as, ...
   * @returns {Generation | Generation[]}  an array if `branch` is a list or `n` is given
   */
  generate(options = {}) {
    const all = this.#start({ type: "generate", branch: "main", ...options });
    return Array.isArray(options.branch) || options.n > 1 ? all : all[0];
  }

  /**
   * Append the likeliest of several texts. Its result has `text`, `choice` (its index) and `scores`.
   * @param {string[]} choices
   * @param {object} [options]  fields of `select`: branch, method, priority, deadline_ms, expect
   * @returns {Generation | Generation[]}  an array if `branch` is a list
   */
  select(choices, options = {}) {
    const all = this.#start({ type: "select", branch: "main", choices, ...options });
    return Array.isArray(options.branch) ? all : all[0];
  }

  /** Children named `as` at the head of `branch` or at position `at`; `branch` null: new roots. */
  fork(as, { branch = "main", at } = {}) {
    return this.#send({ type: "fork", branch, as, at });
  }

  /** Move the head back: `to` a position, or by `turns` appended turns. */
  rollback({ branch = "main", to, turns }) {
    return this.#send({ type: "rollback", branch, to, turns });
  }

  /** Stop generations on branches, or ops by id; without both: all of this session's. `subtree`: with all
   * that was forked off the branches, and every op that waits there. */
  cancel({ branch, ops, subtree } = {}) {
    return this.#send({ type: "cancel", branch, ops, subtree });
  }

  /** What the branches `from` generated last becomes input of `branch`. Options: prefix, each, suffix, role, keep. */
  join(from, { branch = "main", ...options } = {}) {
    return this.#send({ type: "join", from, branch, ...options });
  }

  /** Keep the best of the branches `from`. Options: into, by, k, score_from, keep. `result` says who that is. */
  prune(from, options = {}) {
    return this.#send({ type: "prune", from, ...options });
  }

  /** The branches, with `text` all turns of each. Resolves to a `state` message. */
  async tree({ branch, text, tokens } = {}) {
    for (let tries = 0; tries < TREE_TRIES; tries += 1) {
      const pages = [await this.#send({ type: "tree", branch, text, tokens })];
      while (pages.at(-1).next && pages.at(-1).revision === pages[0].revision) {
        pages.push(await this.#send({ type: "tree", branch, text, tokens, after: pages.at(-1).next }));
      }
      if (pages.at(-1).revision === pages[0].revision) return wholeTree(pages);
    }
    throw new RamifyError("conflict", "the tree changes faster than it can be shown: ask for one branch of it");
  }

  /** Rename, retain or annotate: fields of `set`. */
  set(fields) {
    return this.#send({ type: "set", ...fields });
  }

  /** Release a branch, or a list of them. */
  drop(branch) {
    return this.#send({ type: "drop", branch });
  }

  /** Generations under way; after a refresh, those that went on meanwhile. @returns {Generation[]} */
  running() {
    return this.#core.running().map((each) => this.#generation(each));
  }

  /** End the session on the server (`keep`: only leave it) and forget it here. */
  async close({ keep = false } = {}) {
    if (!keep) this.#storage?.removeItem(this.#place);
    if (this.#open) await this.#send({ type: "close", keep }).catch(() => {});
    this.#end(new RamifyError("closed", "the session was closed"));
  }

  /** Try again now instead of waiting. */
  reconnect() {
    if (this.status === "closed" || this.#socket) return;
    this.#attempt = 0;
    this.#connect();
  }

  #start(fields) {
    const ticket = this.#submit(fields);
    return [...ticket.streams.values()].map((stream) => this.#generation({ ticket, stream }));
  }

  #generation({ ticket, stream }) {
    if (!this.#generations.has(stream)) this.#generations.set(stream, new Generation(this, ticket, stream));
    return this.#generations.get(stream);
  }

  async #send(fields) {
    const ticket = this.#submit(fields);
    await new Promise((resolve) => { ticket.waiting.size ? (ticket.onsettled = resolve) : resolve(); });
    if (ticket.error) throw ticket.error;
    return ticket.replies.length > 1 ? ticket.replies : ticket.replies[0];
  }

  #submit(fields) {
    if (!this.#pending) {
      this.#pending = [];
      this.#frame += 1;
      queueMicrotask(() => this.#flush());
    }
    const ticket = this.#core.submit(fields, this.#frame);
    this.#pending.push(ticket);
    if (this.status === "closed") this.#core.fail(ticket, new RamifyError("closed", "the session was closed"));
    return ticket;
  }

  #flush() {
    const tickets = this.#pending ?? [];
    this.#pending = null;
    this.#save();
    if (this.#open && tickets.length) this.#transmit(tickets.map((ticket) => ticket.op));
  }

  // --- connection -------------------------------------------------------------------------------

  async #connect() {
    clearTimeout(this.#timers.retry);
    this.#status("connecting");
    const marker = (this.#socket = {}); // so that nobody else connects while the token is fetched
    let token;
    try {
      token = typeof this.#options.token === "function" ? await this.#options.token() : this.#options.token;
    } catch (error) {
      if (error instanceof RamifyError && error.code !== "overloaded") return this.#end(error);
      return this.#lost("waiting");
    }
    if (this.#socket !== marker || this.status === "closed") return;
    const socket = new (this.#options.WebSocket ?? WebSocket)(this.#url, ["ramify.v1+json"]);
    this.#socket = socket;
    socket.onopen = () => this.#transmit(this.#core.openMessage(token));
    socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    socket.onclose = ({ code, reason }) => this.#closed(socket, code, reason);
    this.#deadline(OPEN_TIMEOUT_MS);
  }

  #transmit(message) {
    const text = JSON.stringify(message);
    const most = this.state?.limits?.frame_bytes ?? Infinity;
    if (text.length > most || new Blob([text]).size > most) {
      const error = new RamifyError("limit", `${text.length} characters; the server takes ${most} bytes`);
      for (const { id } of [message].flat()) this.#core.receive({ type: "error", id, ...error, message: error.message });
      return;
    }
    this.#socket.send(text);
  }

  #receive(frame) {
    clearTimeout(this.#timers.deadline);
    for (const note of this.#core.receive(frame)) {
      if (note.type === "state") this.#attached(note);
      else if (note.type === "event") this.#emit("tree", note);
      else if (note.type === "bye") this.#status("draining");
      else if (note.type === "error" && !this.#open) this.#refused(note);
    }
  }

  #attached(state) {
    this.#open = true;
    this.#attempt = this.#floor = 0;
    this.#refusal = this.#pending = null; // what was pending is among the unanswered
    for (const ops of this.#core.unanswered()) this.#transmit(ops);
    this.#timers.ping = setInterval(() => this.#ping(PONG_WITHIN_MS), PING_EVERY_MS);
    this.#save();
    this.#status("open");
    this.#emit("state", state);
  }

  #refused({ code, message, retry_ms: retryMs }) {
    const error = new RamifyError(code, message);
    if (code === "no_session" && this.#core.session) {
      this.#core.forget(error);
      this.#transmit(this.#core.openMessage());
      this.#deadline(OPEN_TIMEOUT_MS);
      this.#emit("lost", error);
    } else if (["overloaded", "limit", "internal"].includes(code)) {
      this.#floor = retryMs ?? FIRST_DELAY_MS;
    } else {
      this.#refusal = error; // a close code follows, or never will
      if (code !== "unauthorized") this.#end(error);
    }
  }

  #closed(socket, code, reason) {
    if (socket !== this.#socket) return;
    const final = FINAL[code];
    const retry = code === 4401 && typeof this.#options.token === "function" && this.#attempt < 3;
    if (final && !retry) {
      return this.#end(this.#refusal ?? new RamifyError(final[0], reason ? `${final[1]}: ${reason}` : final[1]));
    }
    if (code === 4429) this.#floor = RATE_DELAY_MS;
    if (code === 1009) this.#failLargest();
    this.#lost("waiting");
  }

  /** A frame was too big for the server: sending it again would end the same way. */
  #failLargest() {
    const largest = this.#core.unanswered().sort((a, b) => JSON.stringify(b).length - JSON.stringify(a).length)[0];
    for (const { id } of largest ?? []) {
      this.#core.receive({ type: "error", id, code: "limit", message: "the frame was too big for the server" });
    }
  }

  /** The connection is gone: try again later (`offline`: when the browser says so). */
  #lost(status) {
    if (this.status === "closed") return;
    this.#dropSocket();
    const ceiling = Math.min(LAST_DELAY_MS, FIRST_DELAY_MS * 2 ** Math.min(this.#attempt, 16));
    const delay = this.#floor + ceiling * Math.random(); // full jitter
    this.#attempt += 1;
    if (status !== "offline") this.#timers.retry = setTimeout(() => this.#connect(), delay);
    this.#status(status, { retryAt: Date.now() + delay });
  }

  #end(error) {
    if (this.status === "closed") return;
    this.#dropSocket();
    this.#stop.abort();
    this.#status("closed", { error });
    this.#core.failAll(error);
  }

  #dropSocket() {
    for (const timer of Object.values(this.#timers)) clearTimeout(timer); // intervals too
    const socket = this.#socket;
    this.#socket = null;
    this.#open = false;
    if (socket?.close) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close();
    }
  }

  /** Give up on this socket unless something arrives in `ms`. */
  #deadline(ms) {
    clearTimeout(this.#timers.deadline);
    this.#timers.deadline = setTimeout(() => this.#lost("waiting"), ms);
  }

  #ping(within) {
    this.#transmit({ type: "ping" });
    this.#deadline(within);
  }

  /** The page is seen again: timers slept, and the connection may be dead without a word. */
  #awake() {
    if (this.#open) this.#ping(PONG_WITHIN_MS / 2);
    else this.reconnect();
  }

  get #place() { return `ramify ${this.#url}`; }

  #save() {
    if (this.#core.saved && this.status !== "closed") {
      this.#storage?.setItem(this.#place, JSON.stringify({ client: this.client, ...this.#core.saved }));
    }
  }

  #status(status, more = {}) {
    this.status = status;
    this.#emit("status", { status, ...more });
  }

  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/** 96 random bits; `crypto.randomUUID` is missing on pages without TLS. */
function randomName() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `web-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
