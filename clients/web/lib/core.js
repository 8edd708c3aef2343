/**
 * The client half of `ramify.v1`, without sockets or timers: server messages in, frames out.
 *
 * `link.js` feeds it what it reads and sends what `nextFrame` gives. One object lives as long as the session,
 * over as many connections as it takes. Ops get their ids when they are first sent, so ids rise in the order
 * of sending; an op without a terminal reply is sent again, same id, after every resume, and the server runs
 * it once (docs/protocol.md, rules 3 and 6). This file knows no time, no DOM, and nobody who waits.
 */

import { Conflict, Internal, LimitExceeded, RamifyError, SessionLost, Skipped, failure, told } from "./errors.js";
import { branchesOf, encoded, fitting, touches } from "./frames.js";
import { Heads } from "./heads.js";
import { Stream, Ticket } from "./stream.js";

/** @import { BranchState, DeltaMessage, DoneMessage, ErrorMessage, EventMessage, OkMessage, Op, OpenFields,
 *    ServerMessage, StateMessage } from "./protocol.js" */

/** @typedef {Omit<Op, "id"> & Record<string, unknown>} NewOp  An op whose id is given when it is sent. */
/** @typedef {Ticket & {json: string}} Sendable */

/** The state of one client in one session. */
export class Core {
  /** @type {string | undefined} */ session;
  /** @type {string | undefined} */ key;
  /** @type {string | undefined} */ viewKey;
  /** The last `state` that answered an `open`. @type {StateMessage | null} */ state = null;
  /** The server's limits, once it told them. @type {Record<string, number>} */ limits = {};
  heads = new Heads();
  open = false; // the session is attached
  /** Why it is over. @type {RamifyError | null} */ error = null;
  #nextId = 1;
  /** @type {Sendable[][]} frames that were not sent yet */ #queue = [];
  /** @type {Sendable[][]} cancels, which overtake them */ #urgent = [];
  /** @type {Sendable[][]} frames to send again */ #again = [];
  /** @type {Map<number, Sendable>} by op id, in the order of ids */ #sent = new Map();
  /** @type {Map<string, Ticket>} generations by branch that no op of this object started */ #adopted = new Map();
  /** @type {Map<string, [Ticket, Stream][]>} by branch, in the order of ids */ #running = new Map();
  /** @type {WeakSet<object>} frames that are not split */ #whole = new WeakSet();
  /** @type {Map<string, number>} */ #credits = new Map();
  /** @type {object[]} */ #posts = [];
  /** @type {Set<string>} */ #guessed = new Set();
  /** What the first `open` makes the session of. @type {string | undefined} */ #import;

  /**
   * @param {OpenFields & {client: string}} opening  fields of `open` that stay the same
   * @param {{session?: string, key?: string}} [saved]  a session that exists
   * @param {string} [file]  a session that `export` wrote, in base64: the new session is made of it
   */
  constructor(opening, { session, key } = {}, file = undefined) {
    this.opening = opening;
    this.session = session;
    this.key = key;
    this.#import = file;
  }

  // --- the connection -----------------------------------------------------------------------------

  /** A connection was made: the message to send first. @returns {Record<string, unknown>} */
  connected() {
    /** @type {Record<string, unknown>} */
    const message = { type: "open", ...this.opening, session: this.session, key: this.key, import: this.#import };
    if (!this.state) return message;
    const moving = this.#made((op) => (op.type === "prune" ? [op.into ?? []].flat() : []));
    const unborn = this.#made((op) => (op.type === "fork" || op.as ? op.as ?? [] : op.type === "set" && op.name ? [op.name] : []));
    const unknown = [...unborn, ...moving].filter((name) => !this.heads.byName.has(name));
    this.#guessed = new Set([...unknown, ...moving]);
    const have = { ...this.heads.have(), ...Object.fromEntries(unknown.map((name) => [name, 0])) };
    return { ...message, have, revision: this.heads.revision };
  }

  /** Branches that ops without a reply make; the server may have made them already.
   *  @param {(op: Op) => string[]} names */
  #made(names) {
    return [...this.#sent.values()].flatMap((ticket) => names(/** @type {Op} */ (ticket.op)));
  }

  /** The connection is gone. */
  disconnected() {
    this.open = false;
  }

  /** A frame was too big for the path to the server: it fails, or it would loop for ever. @param {RamifyError} cause */
  dropBiggest(cause) {
    const frames = this.#frames([...this.#sent.values()]);
    const weight = (/** @type {Sendable[]} */ frame) => frame.reduce((sum, { json }) => sum + json.length, 0);
    const [biggest = []] = frames.sort((a, b) => weight(b) - weight(a));
    for (const ticket of biggest) {
      this.#fail(ticket, new LimitExceeded(`${cause.message}: send it in smaller pieces`, { details: cause.details }));
    }
  }

  /** The session is over here: every op without a reply fails. @param {RamifyError} error */
  end(error) {
    if (this.error) return;
    this.open = false;
    this.error = error;
    this.#failAll(error);
  }

  /** The server does not know the session any more: start over with the next `connected`. @param {RamifyError} error */
  forget(error) {
    this.session = this.key = this.viewKey = undefined;
    this.state = null;
    this.heads = new Heads();
    this.#credits.clear();
    this.#failAll(error);
  }

  /** @param {RamifyError} error */
  #failAll(error) {
    const waiting = [...this.#adopted.values(), ...this.#sent.values(), ...this.#urgent.flat(), ...this.#queue.flat()];
    this.#urgent = [];
    this.#queue = [];
    this.#again = [];
    this.#adopted.clear();
    for (const ticket of waiting) this.#fail(ticket, error);
  }

  // --- sending ------------------------------------------------------------------------------------

  /** A ticket for an op, not queued yet. Throws BadRequest for values that JSON cannot say. @param {NewOp} op
   *  @param {Ticket[]} frame  the tickets of its frame; it is added @returns {Sendable} */
  ticket(op, frame) {
    const ticket = Object.assign(new Ticket(op, frame), { json: encoded(op) });
    frame.push(ticket);
    return ticket;
  }

  /** Queue a frame. @param {Sendable[]} frame @param {boolean} [whole]  it goes out in one piece, or not at all */
  submit(frame, whole = false) {
    if (whole) this.#whole.add(frame);
    if (this.error) {
      for (const ticket of frame) ticket.fail(this.error);
      return;
    }
    const urgent = frame.every(({ op }) => op.type === "cancel" || op.type === "close");
    (urgent ? this.#urgent : this.#queue).push(frame);
  }

  /** Let the server deliver `branch` up to position `upto`; said again after a resume.
   *  @param {string} branch @param {number} upto */
  credit(branch, upto) {
    this.#credits.set(branch, upto);
    this.#posts.push({ type: "credit", branch, upto });
  }

  /** What to say beside ops: credit. @returns {object[]} */
  takePosts() {
    return this.#posts.splice(0);
  }

  /**
   * The next frame to send now; null: there is none, or too many ops wait for a reply. At most
   * `limits.replies_kept` ops are under way: the server keeps that many replies, so after a resume none is
   * missing. A frame over the server's limits is sent in several, unless it is to stay `whole`.
   *
   * @returns {Sendable[] | null}
   */
  nextFrame() {
    if (!this.open) return null;
    for (let frame = this.#again.shift(); frame; frame = this.#again.shift()) {
      const left = frame.filter(({ id }) => this.#sent.has(/** @type {number} */ (id)));
      if (left.length) return left;
    }
    const urgent = this.#urgent.shift();
    if (urgent) return this.#number(urgent);
    const { ops_in_flight: most = 256, replies_kept: kept = 256 } = this.limits;
    for (let frame = this.#queue[0]; frame; frame = this.#queue[0]) {
      const fit = fitting(frame, this.limits);
      if (fit < frame.length && (!fit || this.#whole.has(frame))) {
        this.#tooBig(frame, fit);
        continue;
      }
      if (this.#sent.size && this.#sent.size + fit > Math.min(most, kept)) return null;
      if (fit === frame.length) this.#queue.shift();
      const now = frame.splice(0, fit);
      for (const ticket of now) ticket.frame = now;
      return this.#number(now);
    }
    return null;
  }

  /** The frame at the front cannot be sent. @param {Sendable[]} frame @param {number} fit */
  #tooBig(frame, fit) {
    const { ops_per_frame: ops = Infinity, frame_bytes: bytes = Infinity } = this.limits;
    const most = frame.length > ops ? `${frame.length} ops in a frame; the server takes ${ops}` : `the server takes ${bytes} bytes in a frame`;
    this.withdraw(fit ? [...frame] : frame.slice(0, 1), new LimitExceeded(`${most}: send it in smaller pieces`));
  }

  /**
   * Take ops back that were not sent; later ones of their frame that touch their branches are skipped, as the
   * server would. False: they were sent already.
   *
   * @param {Ticket[]} tickets @param {RamifyError} error
   */
  withdraw(tickets, error) {
    const frame = this.#queue.find((each) => tickets.every((ticket) => each.includes(/** @type {Sendable} */ (ticket))));
    if (!frame || !tickets.length) return false;
    const names = new Set(tickets.flatMap(({ op }) => branchesOf(op)));
    const first = Math.min(...tickets.map((ticket) => frame.indexOf(/** @type {Sendable} */ (ticket))));
    const gone = frame.filter((ticket, i) => tickets.includes(ticket) || (i > first && touches(/** @type {Op} */ (ticket.op), names)));
    const left = frame.filter((ticket) => !gone.includes(ticket));
    frame.splice(0, frame.length, ...left);
    if (!left.length) this.#queue.splice(this.#queue.indexOf(frame), 1);
    for (const ticket of gone) {
      ticket.fail(tickets.includes(ticket) ? error : new Skipped("an earlier op of the frame was not sent", { cause: error }));
    }
    return true;
  }

  /** @param {Sendable[]} frame */
  #number(frame) {
    for (const ticket of frame) {
      ticket.id = this.#nextId++;
      this.#sent.set(ticket.id, ticket);
      for (const stream of ticket.streams.values()) this.#runs(ticket, stream);
    }
    return frame;
  }

  /** @param {Ticket} ticket @param {Stream} stream */
  #runs(ticket, stream) {
    const running = this.#running.get(stream.branch);
    if (running) running.push([ticket, stream]);
    else this.#running.set(stream.branch, [[ticket, stream]]);
  }

  /** The tickets in the frames that they were sent in. @param {Sendable[]} tickets */
  #frames(tickets) {
    /** @type {Map<object, Sendable[]>} */
    const frames = new Map();
    for (const ticket of tickets) frames.set(ticket.frame, [...(frames.get(ticket.frame) ?? []), ticket]);
    return [...frames.values()];
  }

  // --- receiving ----------------------------------------------------------------------------------

  /**
   * A frame from the server.
   * @param {ServerMessage | ServerMessage[]} frame
   * @returns {ServerMessage[]} what the shell has to act on: the state of an open, errors that answer no op, bye,
   *   pong, events, and deltas of generations that were not started here
   */
  receive(frame) {
    const notes = [frame].flat().filter((message) => this.#message(message));
    if (notes.some((note) => note.type === "state")) this.#sweep();
    return notes;
  }

  /** Generations that have not ended, with those that this object did not start. */
  running() {
    return [...this.#running.values()].flat().map(([ticket, stream]) => ({ ticket, stream }));
  }

  /** @param {ServerMessage} message @returns {boolean} whether the shell is to act on it */
  #message(message) {
    switch (message.type) {
      case "delta": return this.#delta(message);
      case "done": this.#done(message); return false;
      case "ok": this.#ok(message); return false;
      case "error": return this.#error(message);
      case "event": this.#event(message); return true;
      case "state":
        if (message.id === undefined) this.#attached(message);
        else this.#reply(message);
        return message.id === undefined;
      default: return true; // bye, pong; types of a newer server are the shell's to ignore
    }
  }

  /** @param {StateMessage} state */
  #attached(state) {
    if (this.state && state.session !== this.session) {
      throw new SessionLost("the server answered with another session; this one is gone");
    }
    const before = new Set(this.heads.byName.keys());
    this.state = state;
    this.session = state.session;
    this.key = state.key ?? this.key;
    this.viewKey = state.view_key ?? this.viewKey;
    this.limits = state.limits ?? this.limits;
    this.open = true;
    this.#import = undefined;
    this.heads.attached(state.branches, state.revision, this.#guessed);
    this.#nextId = Math.max(this.#nextId, state.op + 1);
    for (const branch of state.branches) {
      if (this.#guessed.has(branch.branch)) this.#place(branch, state.op);
      else if (branch.running !== undefined && !before.has(branch.branch)) this.#adopt(branch, branch.running);
    }
    this.#again = this.#frames([...this.#sent.values()]);
    for (const ticket of this.#sent.values()) ticket.resumed = true;
    this.#posts = [...this.#credits].map(([branch, upto]) => ({ type: "credit", branch, upto }));
  }

  /** Where generations start on a branch whose text comes with the text that it inherited.
   *  @param {BranchState} branch @param {number} seen  the highest op id that the server has seen */
  #place({ branch, position, running, started_at: start }, seen) {
    for (const [ticket, stream] of this.#running.get(branch) ?? []) {
      const id = /** @type {number} */ (ticket.id);
      if (id > seen) stream.beginAt(position);
      else if (id === running && start !== undefined) stream.beginAt(start);
      else stream.held = true; // it has ended: `done` will tell
    }
  }

  /** A generation that no op of this object started: the page was loaded again, or it is another client's.
   *  @param {BranchState} branch @param {number} id */
  #adopt({ branch, started_at: start }, id) {
    if (this.#running.has(branch)) return;
    const ticket = new Ticket({ type: "generate", branch }, []);
    const stream = new Stream(branch, start);
    ticket.id = id;
    ticket.adopted = true;
    ticket.streams.set(branch, stream);
    this.#adopted.set(branch, ticket);
    this.#runs(ticket, stream);
  }

  /** Adopted generations that neither run nor were answered right after `state`: they have ended. */
  #sweep() {
    const branches = new Map(this.state?.branches.map((each) => [each.branch, each]));
    for (const [name, ticket] of [...this.#adopted]) {
      const now = branches.get(name);
      if (now?.running !== ticket.id) this.#over(name, now?.reason);
    }
  }

  /** An adopted generation has ended, and no `done` tells of it. @param {string} name
   *  @param {import("./protocol.js").Reason} [reason] */
  #over(name, reason = "cancelled") {
    const ticket = this.#adopted.get(name);
    const stream = ticket?.streams.get(name);
    if (!ticket || !stream) return;
    const position = stream.end || stream.start;
    const usage = { prompt: stream.start, cached: 0, computed: 0, output: 0, forced: 0, hit: {}, queue_ms: 0, ttft_ms: null, total_ms: 0 };
    stream.done = { type: "done", id: ticket.id ?? 0, branch: name, position, reason, usage };
    ticket.settle();
    this.#forgetTicket(ticket);
    stream.onchange();
  }

  /** @param {DeltaMessage} delta */
  #delta(delta) {
    const head = this.heads.get(delta.branch);
    head.received = delta.position;
    head.position = Math.max(head.position, delta.position); // after a resume `state` knew it already
    const first = this.#running.get(delta.branch)?.[0];
    if (!first) return true;
    // Cut back or not, what comes now is its text; if it had ended and was rolled back while this client was
    // away, its `done` is sent again and carries the whole text.
    first[1].add(delta);
    return false;
  }

  /** @param {OkMessage | StateMessage} message */
  #reply(message) {
    const ticket = this.#sent.get(/** @type {number} */ (message.id));
    const branch = message.type === "ok" ? message.branch : undefined;
    if (!ticket?.owes(branch)) return; // a stored reply that was received before
    ticket.replies.push(message);
    if (message.type === "ok") this.heads.applied(ticket.op, message);
    ticket.settle(branch);
    this.#forgetTicket(ticket);
  }

  /** @param {OkMessage} message */
  #ok(message) {
    if (this.#sent.get(message.id)?.streams.size) throw new Internal(`op ${message.id} generates: only \`done\` or \`error\` answers it`);
    this.#reply(message);
  }

  /** @param {DoneMessage} done */
  #done(done) {
    const adopted = this.#adopted.get(done.branch);
    const ticket = adopted?.id === done.id ? adopted : this.#sent.get(done.id);
    const stream = ticket?.streams.get(done.branch);
    if (!ticket || !stream || !ticket.owes(done.branch)) return; // sent again after a resume
    ticket.replies.push(done);
    this.heads.ended(done);
    const running = this.#running.get(done.branch) ?? [];
    const next = running[running.findIndex(([, each]) => each === stream) + 1];
    const over = stream.finish(done);
    const error = failure(done) ?? this.#lacks(ticket, stream, done);
    if (error) {
      error.done = { ...done, text: stream.text };
      stream.error = error;
      ticket.error ??= error;
    }
    ticket.settle(done.branch);
    this.#forgetTicket(ticket);
    stream.onchange();
    if (over.length && next) {
      next[1].pieces.push(...over);
      next[1].onchange();
    }
  }

  /**
   * Whether text got lost with a connection, its branch being gone before the resume. The token that stops a
   * generation need not be announced; after a stop string the count of sampled tokens says nothing.
   *
   * @param {Ticket} ticket @param {Stream} stream @param {DoneMessage} done
   */
  #lacks(ticket, stream, { text, stop, usage, reason, branch }) {
    const silent = text !== undefined || ticket.op.hidden || typeof stop === "string" || !usage.output;
    if (silent || !ticket.resumed) return null;
    const announced = usage.output - (reason === "stop" || reason === "tool" ? 1 : 0);
    if (stream.end >= usage.prompt + announced) return null;
    const message = "the branch was cut back, renamed or dropped before this text was delivered";
    return new Conflict(message, { branch, details: { branch, text: stream.text } });
  }

  /** @param {ErrorMessage} message */
  #error(message) {
    if (message.id === undefined) return true;
    const ticket = this.#sent.get(message.id);
    if (!ticket?.owes(message.branch)) return false;
    const error = told(message);
    if (message.code === "skipped") error.cause = ticket.frame.find((each) => each.error && each.error.code !== "skipped")?.error;
    for (const [name, stream] of ticket.streams) {
      if (!stream.settled && (message.branch === undefined || message.branch === name)) this.#disown(stream);
    }
    this.#fail(ticket, error, message.branch);
    return false;
  }

  /** A generation that ends with `error` has no text: what came is what its branch inherited, or a later one's.
   *  @param {Stream} stream */
  #disown(stream) {
    const running = this.#running.get(stream.branch) ?? [];
    const next = running[running.findIndex(([, each]) => each === stream) + 1];
    next?.[1].pieces.push(...stream.cutBack(0));
  }

  /** @param {EventMessage} event */
  #event(event) {
    this.heads.noted(event);
    if (event.op !== "generate" || event.branch === undefined) return;
    const { branch, details = {} } = event;
    if (this.#adopted.has(branch)) this.#over(branch, details.reason);
    else if (details.position !== undefined) this.#running.get(branch)?.[0]?.[1].beginAt(details.position); // the text so far was another's
  }

  /** @param {Ticket} ticket @param {RamifyError} error @param {string} [branch] */
  #fail(ticket, error, branch) {
    ticket.fail(error, branch);
    this.#forgetTicket(ticket);
  }

  /** Drop what is settled from the tables. @param {Ticket} ticket */
  #forgetTicket(ticket) {
    for (const [name, stream] of ticket.streams) {
      if (!stream.settled) continue;
      const left = (this.#running.get(name) ?? []).filter(([, each]) => each !== stream);
      if (left.length) this.#running.set(name, left);
      else this.#running.delete(name);
      if (this.#adopted.get(name) === ticket) this.#adopted.delete(name);
    }
    if (ticket.settled && ticket.id !== undefined && !ticket.adopted) this.#sent.delete(ticket.id);
  }
}
