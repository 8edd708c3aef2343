/**
 * The connection of one session: socket, timers, the browser's `online` and `visibilitychange`. A lost connection
 * is made again and the session resumed, unseen by those who wait for replies. This file does not know ops.
 */

import { toBase64 } from "./base64.js";
import { ConnectionLost, Internal, LimitExceeded, RamifyError, SessionLost, Unauthorized, told } from "./errors.js";
import { frameOf } from "./frames.js";
import { Pacer, RATE_DELAY_MS, afterClose, delay, pause } from "./reconnect.js";

/** @import { Core } from "./core.js" */
/** @import { ErrorMessage, Note, ServerMessage, StateMessage } from "./protocol.js" */

const OPEN_TIMEOUT_MS = 10_000;
const PING_EVERY_MS = 20_000;
const PONG_WITHIN_MS = 10_000;
const STEADY_MS = 5_000; // a connection that lasts so long was a good one: what comes later is a new loss
const SUDDEN = 5; // connections that ended sooner, one after the other, before the next one waits longer
const TOKENS = 3; // that are asked for in a row where the server refuses them
const FIRST_FRAME = 8_000; // bytes that a server reads of who has shown no token yet
const ENDLESS = Number.MAX_SAFE_INTEGER;

/**
 * `connecting`, `open`, `waiting` (for the next try), `offline` (the browser says so), `draining` (the server is
 * about to stop), `closed` (for good).
 *
 * @typedef {"connecting" | "open" | "waiting" | "offline" | "draining" | "closed"} Status
 *
 * @typedef {{status: "connecting" | "open" | "draining"}
 *   | {status: "waiting" | "offline", retryAt: number, error: RamifyError}
 *   | {status: "closed", error: RamifyError}} StatusChange  `retryAt`: when the next try is, as `Date.now()` tells it
 *
 * @typedef {object} Socket  What is used of a WebSocket.
 * @property {(data: string) => void} send
 * @property {(code?: number) => void} close
 * @property {((event: any) => void) | null} onopen
 * @property {((event: any) => void) | null} onmessage
 * @property {((event: any) => void) | null} onclose
 * @property {((event: any) => void) | null} onerror
 *
 * @typedef {new (url: string, protocols?: string[]) => any} SocketClass
 * @typedef {string | (() => string | undefined | Promise<string | undefined>)} Token
 *
 * @typedef {object} LinkOptions
 * @property {Token} [token]  a bearer token; a function is asked for a fresh one for each connection
 * @property {"resume" | "always" | "never"} [retry]  which connections are tried again: those that were there once
 *   (default), also the first one, or none
 * @property {number} [giveUpMs]  how long to try without a connection (10 minutes)
 * @property {boolean} [renew]  open a new session where the server has forgotten this one (false: it ends)
 * @property {boolean} [pauseHidden]  while the page is hidden, let text and ends of generations wait on the server
 * @property {SocketClass} [WebSocket]  default: the global one, which Node has from 22 on
 *
 * @typedef {object} Hooks  Whom the link tells.
 * @property {(change: StatusChange) => void} status
 * @property {(state: StateMessage) => void} attached
 * @property {(note: Note) => void} noted
 * @property {(error: RamifyError) => void} lost  the server has forgotten the session; a new one is being opened
 */

/** See the module. */
export class Link {
  #url;
  #core;
  #options;
  #hooks;
  /** @type {Socket | null} */ #socket = null;
  #dialing = 0; // counts tries: what an older one brings is not used
  #pacer = new Pacer();
  #known = false; // it was attached once
  #attempt = 0;
  #refusals = 0;
  #sudden = 0;
  #since = 0; // when this connection was attached
  #lostAt = 0; // 0: there is a connection
  #floor = 0;
  /** @type {RamifyError | null} why the server refused this connection */ #refusal = null;
  /** @type {Record<string, ReturnType<typeof setTimeout> | undefined>} */ #timers = {};
  #stop = new AbortController();
  /** @type {Status} */ status = "connecting";

  /** @param {string} url @param {Core} core @param {LinkOptions} options @param {Hooks} hooks */
  constructor(url, core, options, hooks) {
    this.#url = url;
    this.#core = core;
    this.#options = options;
    this.#hooks = hooks;
    const { signal } = this.#stop;
    const listen = (/** @type {any} */ target, /** @type {string} */ name, /** @type {() => void} */ action) =>
      target?.addEventListener?.(name, action, { signal });
    listen(globalThis, "online", () => this.reconnect());
    listen(globalThis, "offline", () => this.#lost(new ConnectionLost("the browser is offline"), "offline"));
    listen(globalThis.document, "visibilitychange", () => this.#seen(globalThis.document.visibilityState === "visible"));
  }

  /** Begin. */
  start() {
    this.#connect();
  }

  /** Try again now instead of waiting. */
  reconnect() {
    if (this.status === "closed" || this.status === "connecting" || this.#socket) return;
    this.#attempt = 0;
    this.#connect();
  }

  /** Send what the core has to send, as far as the limits allow. */
  pump() {
    while (this.#core.open && !this.#timers.pace) {
      const frame = this.#core.nextFrame();
      if (!frame) break;
      const wait = this.#pacer.wait(frame.length, Date.now());
      if (!wait) this.#socket?.send(frameOf(frame));
      else {
        this.#timers.pace = setTimeout(() => {
          this.#timers.pace = undefined;
          this.#socket?.send(frameOf(frame));
          this.pump();
        }, wait);
      }
    }
    const posts = this.#core.open ? this.#core.takePosts() : [];
    if (posts.length) this.#socket?.send(JSON.stringify(posts));
  }

  /** The session is over. @param {RamifyError} error */
  end(error) {
    if (this.status === "closed") return;
    this.#drop();
    this.#stop.abort();
    this.#core.end(error);
    this.#tell({ status: "closed", error });
  }

  // --- the connection -----------------------------------------------------------------------------

  async #connect() {
    clearTimeout(this.#timers.retry);
    const dialing = ++this.#dialing;
    this.#refusal = null;
    this.#tell({ status: "connecting" });
    try {
      const { token } = this.#options;
      const fresh = typeof token === "function" ? await token() : token;
      if (dialing !== this.#dialing || this.status === "closed") return;
      this.#dial(fresh);
    } catch (fault) {
      if (dialing !== this.#dialing || this.status === "closed") return;
      if (fault instanceof RamifyError && fault.code !== "overloaded") this.end(fault);
      else this.#lost(fault instanceof RamifyError ? fault : new ConnectionLost(`no token: ${fault}`, { cause: fault }));
    }
  }

  /** @param {string} [token] */
  #dial(token) {
    const Socket = this.#options.WebSocket ?? globalThis.WebSocket;
    if (!Socket) {
      throw new RamifyError("there is no WebSocket here: give one, connect(url, { WebSocket }), or use Node 22");
    }
    // A token that is wrong is told by an `error` only where it comes with `open`; but who has shown none may say little.
    const long = token !== undefined && JSON.stringify(this.#core.connected()).length * 3 > FIRST_FRAME;
    const protocols = ["ramify.v1+json", ...(long ? [`ramify.bearer.${base64url(token)}`] : [])];
    const socket = /** @type {Socket} */ (new Socket(this.#url, protocols));
    this.#socket = socket;
    socket.onopen = () => socket.send(JSON.stringify({ ...this.#core.connected(), ...(!long && token !== undefined && { token }) }));
    socket.onmessage = ({ data }) => this.#receive(data);
    socket.onclose = ({ code, reason }) => this.#closed(code, reason);
    socket.onerror = () => {}; // `onclose` follows
    this.#deadline(OPEN_TIMEOUT_MS, "no answer to `open`");
  }

  /** @param {string} data */
  #receive(data) {
    clearTimeout(this.#timers.deadline);
    /** @type {ServerMessage[]} */ let notes;
    try {
      notes = this.#core.receive(JSON.parse(data));
    } catch (fault) {
      return this.end(fault instanceof RamifyError ? fault : new Internal(`the server sent what this client does not understand: ${fault}`));
    }
    for (const note of notes) {
      if (note.type === "state") this.#attached(note);
      else if (note.type === "error" && !this.#since) this.#refused(note);
      else if (note.type === "bye") this.#tell({ status: "draining" });
      else if (note.type === "event" || note.type === "delta" || note.type === "error") this.#hooks.noted(note);
    }
    this.pump(); // replies make room for frames that wait
  }

  /** @param {StateMessage} state */
  #attached(state) {
    const { ops_per_second: rate, ops_burst: burst } = this.#core.limits;
    this.#known = true;
    this.#since = Date.now();
    this.#lostAt = this.#floor = this.#refusals = 0;
    this.#pacer.limit(rate, burst, this.#since);
    this.#timers.ping = setInterval(() => this.#ping(PONG_WITHIN_MS), PING_EVERY_MS);
    this.#tell({ status: "open" });
    this.#hooks.attached(state);
    if (globalThis.document?.visibilityState === "hidden") this.#seen(false);
  }

  /** The server did not attach this connection. @param {ErrorMessage} message */
  #refused(message) {
    const error = told(message);
    if (error.code === "no_session" && this.#options.renew && this.#core.session) {
      this.#core.forget(error);
      this.#socket?.send(JSON.stringify(this.#core.connected()));
      this.#deadline(OPEN_TIMEOUT_MS, "no answer to `open`");
      this.#hooks.lost(error);
    } else if (["overloaded", "limit", "internal"].includes(error.code)) {
      this.#floor = pause(error.retryMs ?? 100);
      this.#refusal = error;
    } else if (error instanceof Unauthorized) {
      this.#refusal = error; // a close code follows
    } else if (error.code === "no_session" && this.#known) {
      this.end(new SessionLost(`${error.message}. Its branches are gone`, { details: error.details }));
    } else {
      this.end(error);
    }
  }

  /** @param {number} code @param {string} reason */
  #closed(code, reason) {
    const { action, error } = afterClose(code, reason);
    const why = this.#refusal ?? error;
    const fresh = typeof this.#options.token === "function" && this.#refusals < TOKENS;
    if (action === "newToken" && fresh) this.#refusals += 1;
    else if (action === "stop" || action === "newToken") return this.end(why);
    if (action === "backOff") this.#floor = Math.max(this.#floor, RATE_DELAY_MS);
    if (action === "split" && !this.#core.open) return this.end(new LimitExceeded(`${error.message}: what the session was to be opened with`, { details: error.details }));
    if (action === "split") this.#core.dropBiggest(error);
    this.#lost(why);
  }

  /** The connection is gone: try again later. @param {RamifyError} error @param {"waiting" | "offline"} [status] */
  #lost(error, status = "waiting") {
    if (this.status === "closed") return;
    const now = Date.now();
    if (this.#since) {
      this.#sudden = now - this.#since < STEADY_MS ? this.#sudden + 1 : 0;
      this.#attempt = Math.max(0, this.#sudden - SUDDEN);
    }
    this.#drop();
    this.#lostAt ||= now;
    const { retry = "resume", giveUpMs = 600_000 } = this.#options;
    if (retry === "never" || (retry === "resume" && !this.#known)) return this.end(error);
    const wait = delay(this.#attempt, Math.random(), this.#floor);
    if (now + wait - this.#lostAt > giveUpMs) {
      return this.end(new ConnectionLost(`no way back to the server in ${giveUpMs / 1000} s: ${error.message}`, { cause: error }));
    }
    this.#attempt += 1;
    if (status !== "offline") this.#timers.retry = setTimeout(() => this.#connect(), wait);
    this.#tell({ status, retryAt: now + wait, error });
  }

  #drop() {
    for (const timer of Object.values(this.#timers)) clearTimeout(timer); // intervals too
    this.#timers = {};
    const socket = this.#socket;
    this.#socket = null;
    this.#since = 0;
    this.#dialing += 1;
    this.#core.disconnected();
    if (!socket) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close();
  }

  /** Give up on this socket unless something arrives in `ms`. @param {number} ms @param {string} what */
  #deadline(ms, what) {
    clearTimeout(this.#timers.deadline);
    this.#timers.deadline = setTimeout(() => this.#lost(new ConnectionLost(`${what} in ${ms / 1000} s`)), ms);
  }

  /** @param {number} within */
  #ping(within) {
    this.#socket?.send('{"type":"ping"}');
    this.#deadline(within, "no answer to a ping");
  }

  /** The page is seen again, or not. Timers slept meanwhile, and the connection may be dead without a word.
   *  @param {boolean} visible */
  #seen(visible) {
    if (this.#options.pauseHidden) {
      for (const [name, { received }] of this.#core.heads.byName) this.#core.credit(name, visible ? ENDLESS : received);
      this.pump();
    }
    if (!visible) return;
    if (this.#core.open) this.#ping(PONG_WITHIN_MS / 2);
    else this.reconnect();
  }

  /** @param {StatusChange} change */
  #tell(change) {
    this.status = change.status;
    this.#hooks.status(change);
  }
}

/** @param {string} text */
function base64url(text) {
  return toBase64(new TextEncoder().encode(text)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** `http(s)` becomes `ws(s)`; an address without a path gets `/v1/ws`. @param {string} address @returns {string} */
export function websocketUrl(address) {
  const url = new URL(address.includes("://") ? address : `ws://${address}`);
  url.protocol = { "http:": "ws:", "https:": "wss:" }[url.protocol] ?? url.protocol;
  if (url.pathname === "/") url.pathname = "/v1/ws";
  return url.href;
}
