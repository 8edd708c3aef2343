/** What a program holds of a generation: `Generation`. A view of a ticket's stream. */

import { BadRequest, RamifyError, Skipped } from "./errors.js";
import { gathered } from "./stream.js";

/** @import { DoneMessage, TokenLogprob } from "./protocol.js" */
/** @import { Session } from "./session.js" */
/** @import { Stream, TextDelta, Ticket } from "./stream.js" */

/**
 * How a generation ended: its `done` message with the whole `text` ("" if it was hidden), the `tokens` where the
 * session was opened with them, and the `logprobs` where asked for.
 *
 * @typedef {DoneMessage & {text: string, tokens?: number[], logprobs?: TokenLogprob[]}} Result
 */

/**
 * One generation, or one `select`: iterate for the text as it comes, await `result` for the end, or both.
 *
 * What is not read is merged: memory is that of the text. Leaving a `for await` early cancels the generation on
 * the server, as nobody reads it; to read a part and let it run on, call `next` of its iterator. One that nobody
 * reads at all runs to its end. A cancelled generation ends with the reason "cancelled" and keeps its text.
 */
export class Generation {
  #session;
  #ticket;
  #stream;
  /** @type {(() => void)[]} */ #waiters = [];

  /** @param {Session} session @param {Ticket} ticket @param {Stream} stream */
  constructor(session, ticket, stream) {
    this.#session = session;
    this.#ticket = ticket;
    this.#stream = stream;
    /**
     * The end. Rejects with RamifyError where the op failed or ended with the reason "error", with the failure
     * before it where it was skipped, and with the reason of its `signal` where that was aborted.
     *
     * @type {Promise<Result>}
     */
    this.result = new Promise((resolve, reject) => {
      stream.onchange = () => {
        for (const wake of this.#waiters.splice(0)) wake();
        if (stream.error) reject(thrown(stream.error));
        else if (stream.done) resolve({ ...stream.done, text: stream.text, ...extras(stream) });
      };
    });
    this.result.catch(() => {}); // whoever awaits it is told; nobody has to
    stream.onchange(); // it may have ended before anybody looked
  }

  /** The op's id, once it was sent. @returns {number | undefined} */
  get id() {
    return this.#ticket.id;
  }

  /** The name of the branch that it runs on. */
  get branch() {
    return this.#stream.branch;
  }

  /** The text so far. */
  get text() {
    return this.#stream.text;
  }

  /** Whether it has ended, well or not. */
  get ended() {
    return this.#stream.settled;
  }

  /** Wait for the end; what its text is the JSON of. Rejects with BadRequest for text that was cut.
   *  @returns {Promise<unknown>} */
  async json() {
    const { text, reason } = await this.result;
    try {
      return JSON.parse(text);
    } catch (cause) {
      throw new BadRequest(`the text is no JSON: it ended with the reason "${reason}"`, { branch: this.branch, cause });
    }
  }

  /** New text as it comes. @returns {AsyncIterableIterator<TextDelta>} */
  [Symbol.asyncIterator]() {
    const stream = this.#stream;
    const over = /** @type {IteratorReturnResult<undefined>} */ ({ done: true, value: undefined });
    let left = false;
    return {
      next: async () => {
        while (!left) {
          const delta = stream.take();
          if (delta && (delta.text || delta.tokens || delta.cut)) return { done: false, value: delta };
          if (stream.error) {
            left = true;
            throw thrown(stream.error);
          }
          if (stream.settled) break;
          await /** @type {Promise<void>} */ (new Promise((resolve) => this.#waiters.push(resolve)));
        }
        return over;
      },
      return: async () => {
        left = true;
        this.cancel().catch(() => {});
        return over;
      },
      [Symbol.asyncIterator]() {
        return this;
      },
    };
  }

  /** Stop it; it ends with what it has, and the reason "cancelled". Resolves when the server has answered. */
  async cancel() {
    if (!this.ended) await this.#session.withdraw(this.#ticket, this.branch);
  }
}

/** What went wrong, not that something was skipped for it. @param {RamifyError} error */
function thrown(error) {
  return error instanceof Skipped && error.cause instanceof Error ? error.cause : error;
}

/** @param {Stream} stream */
function extras(stream) {
  const { tokens, logprobs } = gathered(stream.pieces);
  return { ...(tokens && { tokens }), ...(logprobs && { logprobs }) };
}
