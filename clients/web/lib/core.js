/**
 * The state of a `ramify.v1` client: messages in, ops and text out.
 *
 * Pure: no socket, no clock, no DOM. `session.js` is the shell that connects it to a WebSocket.
 * After a lost connection `openMessage` says what is here already and `unanswered` gives the ops to
 * send again, so that every op runs once and no text is lost or doubled (docs/protocol.md, rules 3, 6).
 */

import { RamifyError, Stream } from "./stream.js";

/** A sent op and the branches that still owe its terminal reply. */
class Ticket {
  /** @param {{error: RamifyError | null}} program  what the ops of its frame share: their first failure */
  constructor(op, targets, frame, program = { error: null }) {
    this.op = op;
    this.frame = frame; // ops of a frame are sent again in a frame; null: adopted, never sent again
    this.program = program;
    this.waiting = new Set(targets);
    this.replies = [];
    this.error = null;
    /** @type {Map<string, Stream>} */ this.streams = new Map();
    this.onsettled = () => {};
  }

  /** @returns {boolean} whether this reply was still owed */
  settle(branch, reply, error) {
    const one = this.waiting.has(null) || branch === undefined;
    if (!this.waiting.size || !(one || this.waiting.has(branch))) return false;
    if (one) this.waiting.clear();
    else this.waiting.delete(branch);
    if (reply) this.replies.push(reply);
    this.error ??= error ?? null;
    if (error && error.code !== "skipped") this.program.error ??= error;
    for (const stream of error ? this.streams.values() : []) {
      if (!stream.settled && (branch === undefined || stream.branch === branch)) stream.fail(error);
    }
    if (!this.waiting.size) this.onsettled();
    return true;
  }
}

/** The protocol state of one client in one session. */
export class Core {
  #program = { frame: null, error: null }; // of the frame that ops were submitted for last

  /**
   * @param {object} opening fields of `open` that stay the same: client, detach, tick_ms, template, ...
   * @param {{session: string, key: string, op: number} | null} saved what `saved` gave before a page refresh
   */
  constructor(opening, saved = null) {
    this.opening = opening;
    this.session = saved?.session ?? null;
    this.key = saved?.key ?? null;
    this.nextId = (saved?.op ?? 0) + 1;
    /** @type {number | undefined} the newest change that was told */ this.revision = undefined;
    /** @type {number} the newest one that the last `state` included */ this.included = -1;
    /** @type {object | null} the last `state` that answered an `open` */ this.state = null;
    /** @type {Map<string, {position: number, received: number}>} */ this.heads = new Map();
    /** @type {Map<number, Ticket>} */ this.tickets = new Map();
  }

  /** What a refreshed page needs to come back to this session. */
  get saved() {
    return this.session && { session: this.session, key: this.key, op: this.nextId - 1 };
  }

  /** The message to connect with; resumes if there is a session. @param {string} [token] */
  openMessage(token) {
    const message = { type: "open", ...this.opening, ...(token && { token }) };
    if (!this.session) return message;
    Object.assign(message, { session: this.session, key: this.key, have: {} });
    if (this.state) message.revision = this.revision;
    for (const [name, head] of this.heads) message.have[name] = head.received;
    for (const ticket of this.tickets.values()) { // children that no reply has named yet: all of their text
      for (const name of ticket.streams.keys()) message.have[name] ??= 0;
    }
    return message;
  }

  /** Ops without a terminal reply, in the frames they were sent in. @returns {object[][]} */
  unanswered() {
    const frames = new Map();
    for (const ticket of this.tickets.values()) {
      if (ticket.frame === null) continue;
      if (!frames.has(ticket.frame)) frames.set(ticket.frame, []);
      frames.get(ticket.frame).push(ticket.op);
    }
    return [...frames.values()];
  }

  /** Register an op that goes out with frame number `frame`. @returns {Ticket} */
  submit(fields, frame) {
    const op = { ...fields, id: this.nextId++ };
    if (op.type === "generate" && op.n > 1) {
      op.as ??= Array.from({ length: op.n }, (_, i) => `${op.branch ?? "main"}.${op.id}.${i}`);
    }
    if (this.#program.frame !== frame) this.#program = { frame, error: null };
    const ticket = new Ticket(op, targets(op), frame, this.#program);
    if (op.type === "generate" || op.type === "select") {
      for (const name of ticket.waiting) ticket.streams.set(name, new Stream(name));
    }
    this.tickets.set(op.id, ticket);
    return ticket;
  }

  /** Take an op back that was never sent. */
  fail(ticket, error) {
    ticket.settle(undefined, null, error);
    this.tickets.delete(ticket.op.id);
  }

  /** End: all that is under way fails with `error`. */
  failAll(error) {
    for (const ticket of [...this.tickets.values()]) this.fail(ticket, error);
  }

  /** The server does not know the session any more: start over with the next `openMessage`. */
  forget(error) {
    this.session = this.key = this.state = null;
    this.revision = undefined;
    this.heads.clear();
    this.failAll(error);
  }

  /**
   * A frame from the server.
   * @returns {object[]} the messages that the shell has to act on: state of an open, bye, pong, event,
   *   and errors that answer no op
   */
  receive(frame) {
    const messages = Array.isArray(frame) ? frame : [frame];
    const notes = messages.filter((message) => this.#message(message));
    if (notes.some((note) => note.type === "state")) this.#sweep();
    return notes;
  }

  /** Generations that run and whose stream is here: after a refresh, those that were adopted. */
  running() {
    const streams = [...this.tickets.values()].flatMap((ticket) =>
      [...ticket.streams.values()].map((stream) => ({ ticket, stream })));
    return streams.filter(({ stream }) => !stream.settled);
  }

  #message(message) {
    switch (message.type) {
      case "delta": this.#delta(message); return false;
      case "done": this.#done(message); return false;
      case "ok": this.#ok(message); return false;
      case "error": return this.#error(message);
      case "event": this.#event(message); return true;
      case "state":
        if (message.id === undefined) this.#attached(message);
        else this.#settle(message, message);
        return message.id === undefined;
      default: return true; // bye, pong; types of a newer server are the shell's to ignore
    }
  }

  #attached(state) {
    const before = this.heads;
    this.heads = new Map();
    for (const { branch, position, started_at: start } of state.branches) {
      const received = before.get(branch)?.received ?? (this.#awaited(branch) ? 0 : start ?? position);
      this.heads.set(branch, { position, received });
    }
    for (const { branch, running, started_at: start } of state.branches) {
      if (running === undefined) continue;
      const stream = this.tickets.get(running)?.streams.get(branch);
      if (stream) stream.beginAt(start);
      else if (!before.has(branch)) this.#adopt(branch, running, start);
    }
    Object.assign(this, { state, session: state.session, key: state.key });
    this.revision = this.included = state.revision;
    this.nextId = Math.max(this.nextId, state.op + 1);
  }

  /** A generation that runs though no op of this object started it: the page was refreshed. */
  #adopt(branch, id, start) {
    const ticket = this.tickets.get(id) ?? new Ticket({ type: "generate", id, branch: [] }, [], null);
    ticket.op.branch.push(branch);
    ticket.waiting.add(branch);
    ticket.streams.set(branch, new Stream(branch, start));
    this.tickets.set(id, ticket);
  }

  /** Adopted generations that neither run nor were answered right after `state`: they have ended. */
  #sweep() {
    const running = new Map(this.state.branches.map((each) => [each.branch, each]));
    for (const { ticket, stream } of this.running()) {
      if (ticket.frame !== null || running.get(stream.branch)?.running === ticket.op.id) continue;
      this.#ended(ticket, stream.branch, running.get(stream.branch)?.reason);
    }
  }

  #ended(ticket, branch, reason = "cancelled") {
    const stream = ticket.streams.get(branch);
    const position = stream.parts.at(-1)?.position ?? stream.start;
    stream.done = { type: "done", id: ticket.op.id, branch, position, reason, usage: null };
    stream.onchange();
    this.#settle({ id: ticket.op.id, branch }, stream.done);
  }

  #awaited(branch) {
    return [...this.tickets.values()].some((ticket) => ticket.streams.has(branch));
  }

  #delta({ branch, position, text, truncate }) {
    const head = this.heads.get(branch) ?? { position: 0, received: 0 };
    head.position = head.received = position;
    this.heads.set(branch, head);
    for (const { stream } of this.running()) {
      if (stream.branch !== branch) continue;
      if (truncate !== undefined) stream.cutBack(truncate); // should another's text follow, `done` tells
      if (position > stream.start) stream.parts.push({ position, text });
      stream.onchange();
      return;
    }
  }

  #done(message) {
    const stream = this.tickets.get(message.id)?.streams.get(message.branch);
    if (!stream || stream.settled) return; // sent again after a resume
    const error = failure(message);
    const over = stream.finish(message, error);
    if (error) error.done = { ...message, text: stream.text };
    this.#news(message.revision);
    const head = this.heads.get(message.branch);
    if (head) {
      const told = message.rebased === undefined ? head.received : 0; // else the choice begins with what was there
      head.position = head.received = Math.max(told, message.position);
    }
    this.#settle(message, message, error);
    const next = this.running().find((each) => each.stream.branch === message.branch);
    if (over.length && next) next.stream.parts.push(...over);
  }

  #ok(message) {
    const ticket = this.tickets.get(message.id);
    if (!ticket) return;
    if (this.#news(message.revision)) this.#applied(ticket.op, message);
    this.#settle(message, message);
  }

  /** Whether a reply tells of something that the last `state` did not include. */
  #news(revision) {
    if (revision === undefined) return true;
    this.revision = Math.max(this.revision ?? 0, revision);
    return revision > this.included;
  }

  /** What an op changed in the table of branches. */
  #applied(op, { branch, position, result }) {
    const head = this.heads.get(branch ?? op.branch);
    if (op.type === "fork") {
      const at = position ?? 0;
      for (const name of op.as) if (!this.heads.has(name)) this.heads.set(name, { position: at, received: at });
    } else if (op.type === "drop") {
      this.heads.delete(branch ?? op.branch);
    } else if (op.type === "set" && op.name && head) {
      this.heads.delete(op.branch);
      this.heads.set(op.name, head);
    } else if (op.type !== "prune" && head && position !== undefined) {
      head.position = position;
      head.received = Math.min(head.received, result?.rebased ?? position);
    }
    this.#placed(result ?? {});
  }

  /** Branches that a prune moved, whose text is known by another name; then those that are gone. */
  #placed({ kept = [], dropped = [] }) {
    for (const { from, into, position } of kept) {
      if (into !== from) this.heads.set(into, { position, received: position });
    }
    for (const name of dropped) this.heads.delete(name);
  }

  #error({ id, code, message, branch, details, retry_ms: retryMs }) {
    const error = new RamifyError(code, message, { branch, details, retryMs });
    if (id === undefined) return true;
    if (code === "skipped") error.cause = this.tickets.get(id)?.program.error ?? undefined;
    this.#settle({ id, branch }, null, error);
    return false;
  }

  #event({ revision, op, branch, details = {} }) {
    this.revision = Math.max(this.revision ?? 0, revision);
    if (details.from !== undefined && this.heads.has(details.from)) { // renamed
      this.heads.set(branch, this.heads.get(details.from));
      this.heads.delete(details.from);
    }
    const head = this.heads.get(branch);
    if (op === "drop") {
      this.heads.delete(branch);
    } else if (head && op !== "fork" && op !== "prune" && details.position !== undefined) {
      head.position = details.position;
      if (op === "rollback" || details.rebased !== undefined) {
        head.received = Math.min(head.received, details.rebased ?? details.position);
      }
    }
    for (const name of details.as ?? []) {
      if (!this.heads.has(name)) this.heads.set(name, { position: details.position, received: details.position });
    }
    this.#placed(details);
    if (op !== "generate") return;
    for (const { ticket, stream } of this.running()) { // one of another client that was adopted
      if (stream.branch === branch && ticket.frame === null) this.#ended(ticket, branch, details.reason);
    }
  }

  #settle({ id, branch }, reply, error) {
    const ticket = this.tickets.get(id);
    ticket?.settle(branch, reply, error);
    if (ticket && !ticket.waiting.size) this.tickets.delete(id);
  }
}

/** The branches that each send a terminal reply; [null] for ops that are answered once. */
function targets(op) {
  if (op.type === "generate" && op.as) return op.as;
  if (!["generate", "select", "append", "drop"].includes(op.type)) return [null];
  return [op.branch ?? "main"].flat();
}

/** What a `done` with the reason "error" throws; null for the others. */
function failure({ reason, error, message, branch }) {
  if (reason !== "error") return null;
  return new RamifyError(error ?? "internal", message ?? "the generation failed on the server", { branch });
}
