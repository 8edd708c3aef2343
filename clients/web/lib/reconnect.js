/**
 * What to do when a connection ends: the table of close codes in docs/protocol.md, as data. Also how long
 * to wait before the next try, and how fast to send. Pure: no clock and no randomness of its own.
 */

import { BadRequest, ConnectionLost, Forbidden, RamifyError, Replaced, Unauthorized } from "./errors.js";

const FIRST_DELAY_MS = 100;
const LAST_DELAY_MS = 10_000;
const LONGEST_MS = 60_000; // that a server's `retry_ms` is obeyed

/** At least this long after a server asked for fewer requests. */
export const RATE_DELAY_MS = 5_000;

/**
 * `resume`: connect again. `split`: the same without the frame that was too big. `backOff`: the same after a
 * long wait. `newToken`: resume if there is a fresh token. `stop`: no more.
 *
 * @typedef {"resume" | "split" | "backOff" | "newToken" | "stop"} Action
 * @typedef {{action: Action, error: RamifyError}} Verdict
 */

/** @type {Record<number, [Action, string, (typeof RamifyError)?]>} */
const RULES = {
  1000: ["stop", "the session was closed"],
  1001: ["resume", "the server is stopping"],
  1002: ["stop", "the WebSocket protocol was violated"],
  1003: ["stop", "the server refused a frame of this type", BadRequest],
  1005: ["resume", "the connection was closed without a code"],
  1006: ["resume", "the connection broke"],
  1007: ["stop", "the server read bad UTF-8", BadRequest],
  1009: ["split", "a frame was too big"],
  1011: ["resume", "the server failed"],
  1012: ["resume", "the server restarts"],
  1013: ["backOff", "the server is overloaded"],
  1014: ["resume", "a gateway lost the server"],
  4400: ["stop", "the server cannot parse this client's frames", BadRequest],
  4401: ["newToken", "the token is missing, wrong or spent", Unauthorized],
  4403: ["stop", "the server does not allow this", Forbidden],
  4408: ["resume", "the server did not hear from this client in time"],
  4409: ["stop", "the same client connected again elsewhere", Replaced],
  4429: ["backOff", "the server asks for fewer requests"],
};

/** The verdict on a close code. @param {number} code @param {string} [reason] @returns {Verdict} */
export function afterClose(code, reason = "") {
  const [action, meaning, Kind = ConnectionLost] = RULES[code] ?? ["stop", "the server closed the connection"];
  const more = reason ? `close code ${code}: ${reason}` : `close code ${code}`;
  return { action, error: new Kind(`${meaning} (${more})`, { details: { close: code, reason } }) };
}

/**
 * Milliseconds to wait before try `attempt` (from 0): full jitter under a doubling ceiling, which spreads the
 * clients of a server that came back. `jitter`: uniform in [0, 1).
 *
 * @param {number} attempt @param {number} jitter @param {number} [floor]
 */
export function delay(attempt, jitter, floor = 0) {
  return floor + Math.min(LAST_DELAY_MS, FIRST_DELAY_MS * 2 ** Math.min(attempt, 16)) * jitter;
}

/** Milliseconds that a server asks for with `retry_ms`, within reason. @param {number} [retryMs] */
export function pause(retryMs = 0) {
  return Math.min(Math.max(retryMs, 0), LONGEST_MS);
}

/** A token bucket over `limits.ops_per_second` and `ops_burst`: who waits first is never refused. */
export class Pacer {
  #rate = 0; // ops per millisecond; 0: no limit
  #burst = 0;
  #level = 0;
  #at = 0;

  /** @param {number | undefined} rate ops per second @param {number | undefined} burst ops @param {number} now ms */
  limit(rate, burst, now) {
    this.#rate = rate !== undefined && rate >= 1 ? rate / 1000 : 0;
    this.#level = this.#burst = Math.max(burst ?? rate ?? 1, 1);
    this.#at = now;
  }

  /** Take `ops` from the bucket; milliseconds to wait before they are sent. @param {number} ops @param {number} now */
  wait(ops, now) {
    if (!this.#rate) return 0;
    this.#level = Math.min(this.#burst, this.#level + (now - this.#at) * this.#rate) - ops;
    this.#at = now;
    return Math.max(0, -this.#level / this.#rate);
  }
}
