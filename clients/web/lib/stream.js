/**
 * A sent op and the text it brings back: `Ticket` and `Stream`. Pure state of the client's core.
 *
 * Text is kept in parts: after a part the branch is `position` tokens long. Deltas start and end where
 * text and tokens agree, and none spans two generations, so cutting between parts is exact.
 *
 *     branch    |---- prompt ----| gen 5                | input | gen 7
 *     positions                  24     30        41    43      60      66
 *     parts of stream 5          |"Paris"|" is the"|    |  stream 7: |"Yes"|
 */

/** @import { RamifyError } from "./errors.js" */
/** @import { DeltaMessage, DoneMessage, OkMessage, Op, Part, StateMessage, TokenLogprob } from "./protocol.js" */

/**
 * @typedef {object} Piece  Text up to `position` (absolute, in tokens).
 * @property {number} position
 * @property {string} text
 * @property {number[]} [tokens]
 * @property {TokenLogprob[]} [logprobs]
 * @property {Part[]} [parts]
 *
 * @typedef {object} TextDelta  New text of a generation: everything since the last read.
 * @property {string} branch
 * @property {number} position  the branch's length after it, in tokens
 * @property {string} text
 * @property {number} cut  characters of earlier text to take back first; 0 unless the branch was rolled back
 * @property {number[]} [tokens]  where the session was opened with `tokens`
 * @property {TokenLogprob[]} [logprobs]  where asked for
 * @property {Part[]} [parts]  where the session was opened with `parts`
 */

/** The text of one generation on one branch. */
export class Stream {
  /** @param {string} branch @param {number} [start] deltas up to here are an earlier generation's */
  constructor(branch, start = 0) {
    this.branch = branch;
    this.start = start;
    /** @type {Piece[]} */ this.pieces = [];
    this.taken = 0; // pieces that the reader has read
    this.cut = 0; // characters that the reader has to take back
    this.held = false; // after a resume: whose text the pieces are is not settled yet
    /** @type {DoneMessage | null} */ this.done = null;
    /** @type {RamifyError | null} */ this.error = null;
    this.onchange = () => {};
  }

  /** Whether it has ended, one way or the other. */
  get settled() {
    return this.done !== null || this.error !== null;
  }

  /** The text so far. */
  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  /** The position its text reaches; 0 before the first delta. */
  get end() {
    return this.pieces.at(-1)?.position ?? 0;
  }

  /** @param {DeltaMessage} delta */
  add({ position, text, tokens, logprobs, parts, truncate }) {
    if (truncate !== undefined) this.cutBack(truncate);
    if (position > this.start) this.pieces.push({ position, text, tokens, logprobs, parts });
    this.onchange();
  }

  /** The generation starts at position `start`: what came before it is not its text. @param {number} start */
  beginAt(start) {
    this.start = start;
    const early = this.pieces.filter((piece) => piece.position <= start).length;
    if (!early) return;
    this.cut += size(this.pieces.slice(0, this.taken));
    this.taken = 0; // the reader starts over
    this.pieces.splice(0, early);
  }

  /** Take off the pieces that end after position `to`, and return them. @param {number} to */
  cutBack(to) {
    const over = this.pieces.findIndex((piece) => piece.position > to);
    if (over < 0) return [];
    this.cut += size(this.pieces.slice(over, Math.max(over, this.taken)));
    this.taken = Math.min(this.taken, over);
    return this.pieces.splice(over);
  }

  /**
   * The generation ended. Returns pieces past its end: text of a later generation. The text of `done`, where
   * the server sent it, is the whole text and replaces what the deltas gave.
   *
   * @param {DoneMessage} done
   */
  finish(done) {
    const over = this.cutBack(done.position);
    this.beginAt(done.usage.prompt);
    this.done = done;
    this.held = false;
    if (done.text !== undefined && done.text !== this.text) {
      const read = this.pieces.slice(0, this.taken).map((piece) => piece.text).join("");
      const common = done.text.startsWith(read) ? read.length : 0;
      const rest = { ...gathered(this.pieces), position: done.position, text: done.text.slice(common) };
      this.cut += read.length - common;
      this.pieces = common ? [{ position: done.position, text: read }, rest] : [rest];
      this.taken = common ? 1 : 0;
    }
    return over;
  }

  /** @param {RamifyError} error */
  fail(error) {
    this.error = error;
    this.onchange();
  }

  /** Everything that was not read yet, as one delta; null: nothing is new. @returns {TextDelta | null} */
  take() {
    if (this.held || (this.taken === this.pieces.length && !this.cut)) return null;
    const fresh = this.pieces.slice(this.taken);
    const delta = {
      branch: this.branch,
      position: this.pieces.at(-1)?.position ?? this.start,
      text: fresh.map((piece) => piece.text).join(""),
      cut: this.cut,
      ...gathered(fresh),
    };
    this.taken = this.pieces.length;
    this.cut = 0;
    return delta;
  }
}

/** A sent op, with the branches that still owe its terminal reply. */
export class Ticket {
  /** @param {Omit<Op, "id">} op @param {Ticket[]} frame the tickets that go out with it, and it */
  constructor(op, frame) {
    this.op = op;
    this.frame = frame;
    /** Given when it is sent. @type {number | undefined} */ this.id = undefined;
    /** A generation of an earlier page: never sent again. */ this.adopted = false;
    /** A connection was lost while it was under way. */ this.resumed = false;
    /** @type {(OkMessage | DoneMessage | StateMessage)[]} */ this.replies = [];
    /** @type {RamifyError | null} */ this.error = null;
    const branches = answering(op);
    /** @type {Set<string | null>} null: it is answered once */
    this.waiting = new Set(branches.length ? branches : [null]);
    const brings = op.type === "generate" || op.type === "select";
    /** @type {Map<string, Stream>} */
    this.streams = new Map(brings ? branches.map((name) => [name, new Stream(name)]) : []);
    this.onsettled = () => {};
    this.release = () => {}; // what was set up for the time that it is under way
  }

  get settled() {
    return !this.waiting.size;
  }

  /** Whether a reply that names `branch` is the first one for it. @param {string} [branch] */
  owes(branch) {
    return !this.settled && (branch === undefined || this.waiting.has(null) || this.waiting.has(branch));
  }

  /** The reply for `branch` is in (undefined: for all that are left). @param {string} [branch] */
  settle(branch) {
    if (branch === undefined || this.waiting.has(null)) this.waiting.clear();
    else this.waiting.delete(branch);
    if (!this.settled) return;
    this.release();
    this.onsettled();
  }

  /** Nobody waits for it any more: it is over for the reader, and still under way. @param {RamifyError} error */
  abandon(error) {
    this.error ??= error;
    for (const stream of this.streams.values()) if (!stream.settled) stream.fail(error);
    this.onsettled();
  }

  /** The op failed on `branch` (undefined: on all that are left). @param {RamifyError} error @param {string} [branch] */
  fail(error, branch) {
    this.error ??= error;
    for (const stream of this.streams.values()) {
      if (!stream.settled && (branch === undefined || stream.branch === branch)) stream.fail(error);
    }
    this.settle(branch);
  }
}

/** The branches that each send a terminal reply; none for ops that are answered once. @param {Omit<Op, "id">} op */
function answering(op) {
  if (op.type === "generate" && op.as) return op.as;
  return ["generate", "select", "append", "drop"].includes(op.type) ? [op.branch ?? "main"].flat() : [];
}

/** Characters of some pieces. @param {Piece[]} pieces */
function size(pieces) {
  return pieces.reduce((sum, piece) => sum + piece.text.length, 0);
}

/** What pieces carry beside their text. @param {Piece[]} pieces @returns {Pick<Piece, "tokens" | "logprobs" | "parts">} */
export function gathered(pieces) {
  const tokens = pieces.flatMap((piece) => piece.tokens ?? []);
  const logprobs = pieces.flatMap((piece) => piece.logprobs ?? []);
  const parts = pieces.flatMap((piece) => piece.parts ?? []);
  return { ...(tokens.length && { tokens }), ...(logprobs.length && { logprobs }), ...(parts.length && { parts }) };
}
