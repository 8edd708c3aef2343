/**
 * What to do when a connection ends: the table of close codes in docs/protocol.md, as data. Also how long
 * to wait before the next try, and how fast to send. Pure: no clock and no randomness of its own.
 */
import { RamifyError } from "./errors.js";
/** At least this long after a server asked for fewer requests. */
export declare const RATE_DELAY_MS = 5000;
export type Action = "resume" | "split" | "backOff" | "newToken" | "stop";
export type Verdict = {
    action: Action;
    error: RamifyError;
};
/** The verdict on a close code. @param {number} code @param {string} [reason] @returns {Verdict} */
export declare function afterClose(code: number, reason?: string): Verdict;
/**
 * Milliseconds to wait before try `attempt` (from 0): full jitter under a doubling ceiling, which spreads the
 * clients of a server that came back. `jitter`: uniform in [0, 1).
 *
 * @param {number} attempt @param {number} jitter @param {number} [floor]
 */
export declare function delay(attempt: number, jitter: number, floor?: number): number;
/** Milliseconds that a server asks for with `retry_ms`, within reason. @param {number} [retryMs] */
export declare function pause(retryMs?: number): number;
/** A token bucket over `limits.ops_per_second` and `ops_burst`: who waits first is never refused. */
export declare class Pacer {
    #private;
    /** @param {number | undefined} rate ops per second @param {number | undefined} burst ops @param {number} now ms */
    limit(rate: number | undefined, burst: number | undefined, now: number): void;
    /** Take `ops` from the bucket; milliseconds to wait before they are sent. @param {number} ops @param {number} now */
    wait(ops: number, now: number): number;
}
