/**
 * The text of a generation: `Stream` collects it, `Generation` is what a program reads.
 *
 * Text is kept in parts: after a part the branch is `position` tokens long. Deltas start and end where
 * text and tokens agree, so cutting between parts is exact. Knows neither messages nor sockets.
 *
 * @typedef {{position: number, text: string}} Part  Text up to `position` (absolute, in tokens).
 * @typedef {{branch: string, position: number, text: string, cut: number}} TextDelta
 *   New text since the last read; `cut`: characters of earlier text to take back first.
 */

/** An error of the server, or of the connection. `code`: see docs/protocol.md. */
export class RamifyError extends Error {
  /** @param {string} code @param {string} message
   *  @param {object} [more] branch, details, retryMs; `done`: of a generation that failed on its way */
  constructor(code, message, more = {}) {
    super(message);
    this.name = "RamifyError";
    this.code = code;
    Object.assign(this, more);
  }
}

/** The text of one generation on one branch. */
export class Stream {
  /** @param {string} branch @param {number} [start] deltas up to here are an earlier generation's */
  constructor(branch, start = 0) {
    this.branch = branch;
    this.start = start;
    /** @type {Part[]} */ this.parts = [];
    this.taken = 0;
    this.cut = 0;
    this.done = null;
    this.error = null;
    this.onchange = () => {};
  }

  get settled() {
    return this.done !== null || this.error !== null;
  }

  get text() {
    return this.parts.map((part) => part.text).join("");
  }

  /** Take off the parts that end after `to`; returns them. */
  cutBack(to) {
    let kept = this.parts.length;
    while (kept && this.parts[kept - 1].position > to) kept -= 1;
    const over = this.parts.splice(kept);
    this.cut += length(over.slice(0, Math.max(0, this.taken - kept)));
    this.taken = Math.min(this.taken, kept);
    return over;
  }

  /** The generation starts at `start`: what came before it is not its text. */
  beginAt(start) {
    this.start = start;
    const early = this.parts.filter((part) => part.position <= start).length;
    if (!early) return;
    this.cut += length(this.parts.slice(0, this.taken));
    this.taken = 0; // the reader starts over
    this.parts.splice(0, early);
  }

  /** The generation ended, perhaps by an error. Returns parts past its end: text of a later generation. */
  finish(done, error = null) {
    const over = this.cutBack(done.position);
    this.beginAt(done.usage.prompt);
    if (done.text !== undefined && done.text !== this.text) { // quiet, or repeated after a resume: this is all of it
      this.cut += length(this.parts.slice(0, this.taken));
      this.parts = [{ position: done.position, text: done.text }];
      this.taken = 0;
    }
    if (error) this.error = error;
    else this.done = done;
    this.onchange();
    return over;
  }

  fail(error) {
    this.error = error;
    this.onchange();
  }

  /** Everything that was not read yet, as one delta. @returns {TextDelta | null} */
  take() {
    if (this.taken === this.parts.length && !this.cut) return null;
    const fresh = this.parts.slice(this.taken);
    const delta = {
      branch: this.branch,
      position: this.parts.at(-1)?.position ?? this.start,
      text: fresh.map((part) => part.text).join(""),
      cut: this.cut,
    };
    this.taken = this.parts.length;
    this.cut = 0;
    return delta;
  }
}

/** One generation: iterate for the text as it comes, `await .result` for the end. */
export class Generation {
  #ticket;
  #stream;
  #wake = () => {};

  constructor(session, ticket, stream) {
    this.session = session;
    this.#ticket = ticket;
    this.#stream = stream;
    /** @type {Promise<object>} the `done` message with the whole `text` ("" if it was hidden); rejects with
     *  RamifyError where the op failed, was skipped (`cause`: what failed), or ended with the reason "error" */
    this.result = new Promise((resolve, reject) => {
      stream.onchange = () => {
        this.#wake();
        if (stream.done) resolve({ ...stream.done, text: stream.text });
        else if (stream.error) reject(stream.error);
      };
    });
    this.result.catch(() => {}); // whoever awaits it is told; nobody has to
    stream.onchange(); // it may have ended before anybody looked
  }

  get id() { return this.#ticket.op.id; }
  get branch() { return this.#stream.branch; }
  /** The text so far. */
  get text() { return this.#stream.text; }
  get ended() { return this.#stream.settled; }

  /** @returns {AsyncGenerator<TextDelta>} */
  async *[Symbol.asyncIterator]() {
    for (;;) {
      const delta = this.#stream.take();
      if (delta) yield delta;
      else if (this.#stream.error) throw this.#stream.error;
      else if (this.#stream.done) return;
      else await new Promise((resolve) => { this.#wake = resolve; });
    }
  }

  /** Stop it; it then ends with reason "cancelled" and keeps its text. */
  cancel() {
    return this.session.cancel({ branch: this.branch });
  }
}

/** Characters of some parts. @param {Part[]} parts */
function length(parts) {
  return parts.reduce((sum, part) => sum + part.text.length, 0);
}
