/**
 * What the client throws: the protocol's errors by code, and those of a lost connection.
 *
 *     RamifyError                    code, branch, details, retryMs, cause
 *     |-- BadRequest, Unauthorized, Forbidden, NoBranch, Exists, Conflict, LimitExceeded, TooLong,
 *     |   BadConstraint, Unsupported, Overloaded, DeadlineExceeded, Cancelled, Skipped, Internal
 *     |-- NoSession
 *     |   `-- SessionLost            the session went away while this client was using it
 *     `-- ConnectionLost             no way back to the server
 *         `-- Replaced               another connection of the same client took over (4409)
 *
 * This file does not know when an error is thrown.
 */
import type { DoneMessage, ErrorCode, ErrorMessage } from "./protocol.js";
export type ErrorFields = {
    /**
     * the branch on which it happened
     */
    branch?: string;
    /**
     * facts for programs, such as `{max: 2048}`
     */
    details?: Record<string, unknown>;
    /**
     * trying again after so many milliseconds may help
     */
    retryMs?: number;
    /**
     * of what was skipped: the failure before it
     */
    cause?: unknown;
};
/** @import { DoneMessage, ErrorCode, ErrorMessage } from "./protocol.js" */
/**
 * @typedef {object} ErrorFields
 * @property {string} [branch]  the branch on which it happened
 * @property {Record<string, unknown>} [details]  facts for programs, such as `{max: 2048}`
 * @property {number} [retryMs]  trying again after so many milliseconds may help
 * @property {unknown} [cause]  of what was skipped: the failure before it
 */
/** An error of the server, or of the connection. `message` says what is wrong and how to mend it. */
export declare class RamifyError extends Error {
    /** The branch on which it happened, if it was on one. */
    branch: string | undefined;
    /** Facts for programs. */
    details: Record<string, unknown> | undefined;
    /** Milliseconds after which trying again may help. */
    retryMs: number | undefined;
    /** Of a generation that failed on its way: its end, with the text so far. @type {DoneMessage | undefined} */
    done: DoneMessage | undefined;
    /** The protocol's code for it, see docs/protocol.md. @type {ErrorCode} */
    code: ErrorCode;
    /** @param {string} message @param {ErrorFields} [fields] */
    constructor(message: string, { branch, details, retryMs, cause }?: ErrorFields);
}
/** A frame or a field of it is wrong; the message names it. */
export declare class BadRequest extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** No token, or a wrong one. */
export declare class Unauthorized extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** Known, but not allowed: a viewer that writes, say. */
export declare class Forbidden extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** The server knows no such session. */
export declare class NoSession extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** The server no longer has the session (restart, expiry, closed by another client). Its branches are gone. */
export declare class SessionLost extends NoSession {
}
/** There is no such branch. */
export declare class NoBranch extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** The name of a branch is taken. */
export declare class Exists extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** The branch is not where `expect` says. */
export declare class Conflict extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** Over a limit; `session.limits` has the numbers. */
export declare class LimitExceeded extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** Over the length of the context, `details.max`. */
export declare class TooLong extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** A constraint that cannot be compiled; `details.position` or `details.pointer` says where. */
export declare class BadConstraint extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** Typed in the protocol, not served by this server. */
export declare class Unsupported extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** A queue is full; `retryMs`. */
export declare class Overloaded extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** The deadline passed before the op began. */
export declare class DeadlineExceeded extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** The op was cancelled before it began. (A generation that began ends with a result.) */
export declare class Cancelled extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** An earlier op of the same frame failed on this branch; `cause` is that failure. */
export declare class Skipped extends RamifyError {
    /** @type {ErrorCode} */ code: ErrorCode;
}
/** A fault of the server, or an answer that breaks the protocol. */
export declare class Internal extends RamifyError {
}
/** The connection ended for good; `details.close` is the close code, if any. Ops without a reply may have run. */
export declare class ConnectionLost extends RamifyError {
}
/** A newer connection with the same `client` name attached to the session. */
export declare class Replaced extends ConnectionLost {
}
/** The error of a code. @param {ErrorCode} code @param {string} message @param {ErrorFields} [fields] */
export declare function errorOf(code: ErrorCode, message: string, fields?: ErrorFields): RamifyError;
/** The error that an `error` message tells. @param {ErrorMessage} told */
export declare function told({ code, message, branch, details, retry_ms: retryMs }: ErrorMessage): RamifyError;
/** What a generation that ended with the reason "error" throws; null for the others. @param {DoneMessage} done */
export declare function failure({ reason, error, message, branch }: DoneMessage): RamifyError | null;
