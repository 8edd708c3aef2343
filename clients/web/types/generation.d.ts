/** What a program holds of a generation: `Generation`. A view of a ticket's stream. */
import type { DoneMessage, TokenLogprob } from "./protocol.js";
import type { Session } from "./session.js";
import type { Stream, TextDelta, Ticket } from "./stream.js";
export type Result = DoneMessage & {
    text: string;
    tokens?: number[];
    logprobs?: TokenLogprob[];
};
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
export declare class Generation {
    #private;
    /**
     * The end. Rejects with RamifyError where the op failed or ended with the reason "error", with the failure
     * before it where it was skipped, and with the reason of its `signal` where that was aborted.
     *
     * @type {Promise<Result>}
     */
    result: Promise<Result>;
    /** @param {Session} session @param {Ticket} ticket @param {Stream} stream */
    constructor(session: Session, ticket: Ticket, stream: Stream);
    /** The op's id, once it was sent. @returns {number | undefined} */
    get id(): number | undefined;
    /** The name of the branch that it runs on. */
    get branch(): string;
    /** The text so far. */
    get text(): string;
    /** Whether it has ended, well or not. */
    get ended(): boolean;
    /** Wait for the end; what its text is the JSON of. Rejects with BadRequest for text that was cut.
     *  @returns {Promise<unknown>} */
    json(): Promise<unknown>;
    /** New text as it comes. @returns {AsyncIterableIterator<TextDelta>} */
    [Symbol.asyncIterator](): AsyncIterableIterator<TextDelta>;
    /** Stop it; it ends with what it has, and the reason "cancelled". Resolves when the server has answered. */
    cancel(): Promise<void>;
}
