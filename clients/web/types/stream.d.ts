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
import type { RamifyError } from "./errors.js";
import type { DeltaMessage, DoneMessage, OkMessage, Op, Part, StateMessage, TokenLogprob } from "./protocol.js";
export type Piece = {
    position: number;
    text: string;
    tokens?: number[];
    logprobs?: TokenLogprob[];
    parts?: Part[];
};
export type TextDelta = {
    branch: string;
    /**
     * the branch's length after it, in tokens
     */
    position: number;
    text: string;
    /**
     * characters of earlier text to take back first; 0 unless the branch was rolled back
     */
    cut: number;
    /**
     * where the session was opened with `tokens`
     */
    tokens?: number[];
    /**
     * where asked for
     */
    logprobs?: TokenLogprob[];
    /**
     * where the session was opened with `parts`
     */
    parts?: Part[];
};
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
export declare class Stream {
    branch: string;
    start: number;
    /** @type {Piece[]} */ pieces: Piece[];
    taken: number;
    cut: number;
    held: boolean;
    /** @type {DoneMessage | null} */ done: DoneMessage | null;
    /** @type {RamifyError | null} */ error: RamifyError | null;
    onchange: () => void;
    /** @param {string} branch @param {number} [start] deltas up to here are an earlier generation's */
    constructor(branch: string, start?: number);
    /** Whether it has ended, one way or the other. */
    get settled(): boolean;
    /** The text so far. */
    get text(): string;
    /** The position its text reaches; 0 before the first delta. */
    get end(): number;
    /** @param {DeltaMessage} delta */
    add({ position, text, tokens, logprobs, parts, truncate }: DeltaMessage): void;
    /** The generation starts at position `start`: what came before it is not its text. @param {number} start */
    beginAt(start: number): void;
    /** Take off the pieces that end after position `to`, and return them. @param {number} to */
    cutBack(to: number): Piece[];
    /**
     * The generation ended. Returns pieces past its end: text of a later generation. The text of `done`, where
     * the server sent it, is the whole text and replaces what the deltas gave.
     *
     * @param {DoneMessage} done
     */
    finish(done: DoneMessage): Piece[];
    /** @param {RamifyError} error */
    fail(error: RamifyError): void;
    /** Everything that was not read yet, as one delta; null: nothing is new. @returns {TextDelta | null} */
    take(): TextDelta | null;
}
/** A sent op, with the branches that still owe its terminal reply. */
export declare class Ticket {
    op: Omit<Op, "id">;
    frame: Ticket[];
    /** Given when it is sent. @type {number | undefined} */ id: number | undefined;
    /** A generation of an earlier page: never sent again. */ adopted: boolean;
    /** A connection was lost while it was under way. */ resumed: boolean;
    /** @type {(OkMessage | DoneMessage | StateMessage)[]} */ replies: (OkMessage | DoneMessage | StateMessage)[];
    /** @type {RamifyError | null} */ error: RamifyError | null;
    /** @type {Set<string | null>} null: it is answered once */
    waiting: Set<string | null>;
    /** @type {Map<string, Stream>} */
    streams: Map<string, Stream>;
    onsettled: () => void;
    release: () => void;
    /** @param {Omit<Op, "id">} op @param {Ticket[]} frame the tickets that go out with it, and it */
    constructor(op: Omit<Op, "id">, frame: Ticket[]);
    get settled(): boolean;
    /** Whether a reply that names `branch` is the first one for it. @param {string} [branch] */
    owes(branch?: string): boolean;
    /** The reply for `branch` is in (undefined: for all that are left). @param {string} [branch] */
    settle(branch?: string): void;
    /** Nobody waits for it any more: it is over for the reader, and still under way. @param {RamifyError} error */
    abandon(error: RamifyError): void;
    /** The op failed on `branch` (undefined: on all that are left). @param {RamifyError} error @param {string} [branch] */
    fail(error: RamifyError, branch?: string): void;
}
/** What pieces carry beside their text. @param {Piece[]} pieces @returns {Pick<Piece, "tokens" | "logprobs" | "parts">} */
export declare function gathered(pieces: Piece[]): Pick<Piece, "tokens" | "logprobs" | "parts">;
