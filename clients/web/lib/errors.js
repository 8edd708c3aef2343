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

/** @import { DoneMessage, ErrorCode, ErrorMessage } from "./protocol.js" */

/**
 * @typedef {object} ErrorFields
 * @property {string} [branch]  the branch on which it happened
 * @property {Record<string, unknown>} [details]  facts for programs, such as `{max: 2048}`
 * @property {number} [retryMs]  trying again after so many milliseconds may help
 * @property {unknown} [cause]  of what was skipped: the failure before it
 */

/** An error of the server, or of the connection. `message` says what is wrong and how to mend it. */
export class RamifyError extends Error {
  /** The protocol's code for it, see docs/protocol.md. @type {ErrorCode} */
  code = "internal";

  /** @param {string} message @param {ErrorFields} [fields] */
  constructor(message, { branch, details, retryMs, cause } = {}) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = new.target.name;
    /** The branch on which it happened, if it was on one. */
    this.branch = branch;
    /** Facts for programs. */
    this.details = details;
    /** Milliseconds after which trying again may help. */
    this.retryMs = retryMs;
    /** Of a generation that failed on its way: its end, with the text so far. @type {DoneMessage | undefined} */
    this.done = undefined;
  }
}

/** A frame or a field of it is wrong; the message names it. */
export class BadRequest extends RamifyError {
  /** @type {ErrorCode} */ code = "bad_request";
}

/** No token, or a wrong one. */
export class Unauthorized extends RamifyError {
  /** @type {ErrorCode} */ code = "unauthorized";
}

/** Known, but not allowed: a viewer that writes, say. */
export class Forbidden extends RamifyError {
  /** @type {ErrorCode} */ code = "forbidden";
}

/** The server knows no such session. */
export class NoSession extends RamifyError {
  /** @type {ErrorCode} */ code = "no_session";
}

/** The server no longer has the session (restart, expiry, closed by another client). Its branches are gone. */
export class SessionLost extends NoSession {}

/** There is no such branch. */
export class NoBranch extends RamifyError {
  /** @type {ErrorCode} */ code = "no_branch";
}

/** The name of a branch is taken. */
export class Exists extends RamifyError {
  /** @type {ErrorCode} */ code = "exists";
}

/** The branch is not where `expect` says. */
export class Conflict extends RamifyError {
  /** @type {ErrorCode} */ code = "conflict";
}

/** Over a limit; `session.limits` has the numbers. */
export class LimitExceeded extends RamifyError {
  /** @type {ErrorCode} */ code = "limit";
}

/** Over the length of the context, `details.max`. */
export class TooLong extends RamifyError {
  /** @type {ErrorCode} */ code = "too_long";
}

/** A constraint that cannot be compiled; `details.position` or `details.pointer` says where. */
export class BadConstraint extends RamifyError {
  /** @type {ErrorCode} */ code = "bad_constraint";
}

/** Typed in the protocol, not served by this server. */
export class Unsupported extends RamifyError {
  /** @type {ErrorCode} */ code = "unsupported";
}

/** A queue is full; `retryMs`. */
export class Overloaded extends RamifyError {
  /** @type {ErrorCode} */ code = "overloaded";
}

/** The deadline passed before the op began. */
export class DeadlineExceeded extends RamifyError {
  /** @type {ErrorCode} */ code = "deadline";
}

/** The op was cancelled before it began. (A generation that began ends with a result.) */
export class Cancelled extends RamifyError {
  /** @type {ErrorCode} */ code = "cancelled";
}

/** An earlier op of the same frame failed on this branch; `cause` is that failure. */
export class Skipped extends RamifyError {
  /** @type {ErrorCode} */ code = "skipped";
}

/** A fault of the server, or an answer that breaks the protocol. */
export class Internal extends RamifyError {}

/** The connection ended for good; `details.close` is the close code, if any. Ops without a reply may have run. */
export class ConnectionLost extends RamifyError {}

/** A newer connection with the same `client` name attached to the session. */
export class Replaced extends ConnectionLost {}

/** @type {Record<ErrorCode, new (message: string, fields?: ErrorFields) => RamifyError>} */
const BY_CODE = {
  bad_request: BadRequest,
  unauthorized: Unauthorized,
  forbidden: Forbidden,
  no_session: NoSession,
  no_branch: NoBranch,
  exists: Exists,
  conflict: Conflict,
  limit: LimitExceeded,
  too_long: TooLong,
  bad_constraint: BadConstraint,
  unsupported: Unsupported,
  overloaded: Overloaded,
  deadline: DeadlineExceeded,
  cancelled: Cancelled,
  skipped: Skipped,
  internal: Internal,
};

/** The error of a code. @param {ErrorCode} code @param {string} message @param {ErrorFields} [fields] */
export function errorOf(code, message, fields) {
  return new (BY_CODE[code] ?? Internal)(message, fields);
}

/** The error that an `error` message tells. @param {ErrorMessage} told */
export function told({ code, message, branch, details, retry_ms: retryMs }) {
  return errorOf(code, message, { branch, details, retryMs });
}

/** What a generation that ended with the reason "error" throws; null for the others. @param {DoneMessage} done */
export function failure({ reason, error, message, branch }) {
  if (reason !== "error") return null;
  return errorOf(error ?? "internal", message ?? "the generation failed on the server", { branch });
}
