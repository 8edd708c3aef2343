/**
 * What a program holds of a session: `connect`, `Session`.
 *
 *     import { connect } from "ramify-client";
 *     const session = connect("ws://127.0.0.1:8765");
 *     for await (const { text } of session.main.chat("Tell me a story.")) console.log(text);
 *     await session.close();
 *
 * Ops that are called in one turn of the event loop travel in one frame, so they are a program: append, fork,
 * generate on the children. What messages mean is in `core.js`, sockets are in `link.js`.
 */
import { Branch } from "./branch.js";
import { RamifyError } from "./errors.js";
import { Generation } from "./generation.js";
import type { NewOp } from "./core.js";
import type { LinkOptions, Status, StatusChange } from "./link.js";
import type { ChatMessage, DeltaMessage, EventMessage, GenerateFields, JoinFields, KvHints, Note, OkMessage, OpenFields, PruneFields, SelectFields, StateMessage } from "./protocol.js";
import type { Ticket } from "./stream.js";
export type SessionOptions = {
    /**
     * a name that stays the same across reconnects; default: a random one
     */
    client?: string;
    /**
     * with `key`: a session that exists
     */
    session?: string;
    /**
     * its key, or its view key
     */
    key?: string;
    /**
     * a new session that is what `export` wrote, of this server or another one with the same
     * model; what `storage` kept is not used then
     */
    import?: Uint8Array;
    /**
     * where client, session and key are kept, so that a page that is loaded again
     * comes back (sessionStorage: another tab does not share them); default: nowhere
     */
    storage?: Storage | null;
    /**
     * more fields of `open`: detach, tick_ms, ttl_s, template, tools, parts, tokens, model
     */
    open?: OpenFields;
};
export type Options = SessionOptions & LinkOptions;
export type Shown = {
    /**
     * files of pictures (PNG, JPEG, WebP, GIF): bytes, or base64
     */
    images?: (Uint8Array | string)[];
};
export type Abortable = {
    /**
     * cancels the op, which then rejects with the signal's reason
     */
    signal?: AbortSignal;
};
export type Short = {
    regex?: string;
    json_schema?: object | string;
    choices?: string[];
    grammar?: string;
    /**
     * true: go on with the constrained output that the branch ends in (as where
     * no constraint is given), or fail; false: the output is free
     */
    continue_constraint?: boolean;
};
export type SessionEvents = {
    status: StatusChange;
    /**
     * the answer to an `open`
     */
    state: StateMessage;
    /**
     * another client changed it
     */
    tree: EventMessage;
    /**
     * of a generation that was not started here
     */
    text: DeltaMessage;
    /**
     * the server has forgotten the session and `renew` is set: all branches are gone, a new one
     * is being opened; ops called from the handler run in it
     */
    lost: RamifyError;
};
export type Told = {
    [Name in keyof SessionEvents]: CustomEvent<SessionEvents[Name]> & {
        type: Name;
    };
};
export type SessionEvent = Told[keyof Told];
export type TellsEvents = Pick<EventTarget, "dispatchEvent"> & {
    addEventListener<Name extends keyof Told>(type: Name, listener: ((event: Told[Name]) => void) | {
        handleEvent(event: Told[Name]): void;
    } | null, options?: boolean | AddEventListenerOptions): void;
    removeEventListener<Name extends keyof Told>(type: Name, listener: ((event: Told[Name]) => void) | {
        handleEvent(event: Told[Name]): void;
    } | null, options?: boolean | EventListenerOptions): void;
};
/**
 * @typedef {object} SessionOptions
 * @property {string} [client]  a name that stays the same across reconnects; default: a random one
 * @property {string} [session]  with `key`: a session that exists
 * @property {string} [key]  its key, or its view key
 * @property {Uint8Array} [import]  a new session that is what `export` wrote, of this server or another one with the same
 *   model; what `storage` kept is not used then
 * @property {Storage | null} [storage]  where client, session and key are kept, so that a page that is loaded again
 *   comes back (sessionStorage: another tab does not share them); default: nowhere
 * @property {OpenFields} [open]  more fields of `open`: detach, tick_ms, ttl_s, template, tools, parts, tokens, model
 *
 * @typedef {SessionOptions & LinkOptions} Options
 *
 * @typedef {object} Shown
 * @property {(Uint8Array | string)[]} [images]  files of pictures (PNG, JPEG, WebP, GIF): bytes, or base64
 *
 * @typedef {object} Abortable
 * @property {AbortSignal} [signal]  cancels the op, which then rejects with the signal's reason
 *
 * @typedef {object} Short  A constraint in short: one of these.
 * @property {string} [regex]
 * @property {object | string} [json_schema]
 * @property {string[]} [choices]
 * @property {string} [grammar]
 * @property {boolean} [continue_constraint]  true: go on with the constrained output that the branch ends in (as where
 *   no constraint is given), or fail; false: the output is free
 */
/**
 * @typedef {object} SessionEvents  What the `detail` of each event is.
 * @property {StatusChange} status
 * @property {StateMessage} state  the answer to an `open`
 * @property {EventMessage} tree  another client changed it
 * @property {DeltaMessage} text  of a generation that was not started here
 * @property {RamifyError} lost  the server has forgotten the session and `renew` is set: all branches are gone, a new one
 *   is being opened; ops called from the handler run in it
 *
 * @typedef {{[Name in keyof SessionEvents]: CustomEvent<SessionEvents[Name]> & {type: Name}}} Told
 * @typedef {Told[keyof Told]} SessionEvent  Any of them: `type` tells which.
 *
 * @typedef {Pick<EventTarget, "dispatchEvent"> & {
 *   addEventListener<Name extends keyof Told>(type: Name, listener: ((event: Told[Name]) => void) | {handleEvent(event: Told[Name]): void} | null,
 *     options?: boolean | AddEventListenerOptions): void,
 *   removeEventListener<Name extends keyof Told>(type: Name, listener: ((event: Told[Name]) => void) | {handleEvent(event: Told[Name]): void} | null,
 *     options?: boolean | EventListenerOptions): void,
 * }} TellsEvents
 */
/** An `EventTarget` whose events are typed. @type {new () => TellsEvents} */
declare const Target: new () => TellsEvents;
/**
 * Connect: a new session, or with `session` and `key` (or what `storage` kept) one that exists. Returns at once; ops
 * wait for the connection. `await session.ready` for the errors of connecting.
 *
 * @param {string} url  `ws://host:port` or `http://host:port`; the path is `/v1/ws` unless there is one
 * @param {Options} [options]
 */
export declare function connect(url: string, options?: Options): Session;
/** A single-use token for `connect`, minted with a long-lived one. Throws RamifyError.
 *  @param {string | URL} base  `http(s)://host` @param {string} bearer @returns {Promise<string>} */
export declare function mintToken(base: string | URL, bearer: string): Promise<string>;
/** A session. Its events are `SessionEvents`. */
export declare class Session extends Target {
    #private;
    /**
     * Resolves with this session when it is attached for the first time; rejects with what prevented it.
     * @type {Promise<this>}
     */
    ready: Promise<this>;
    /** The branch that every session has. */
    main: Branch;
    /** See `connect`. @param {string} url @param {Options} options */
    constructor(url: string, { client, session, key, import: file, storage, open, ...options }?: Options);
    /** This client's name in the session: give it to `connect` to come back as the same client. */
    get client(): string;
    /** With `key`, what another `connect` needs to attach to this session; undefined before it is attached. */
    get id(): string | undefined;
    get key(): string | undefined;
    /** A key to give away: it opens the session for reading. */
    get viewKey(): string | undefined;
    /** The last `state` that answered `open`; null before. */
    get state(): StateMessage | null;
    /** @returns {Status} */
    get status(): Status;
    /** Why it is over; null while it lives. */
    get error(): RamifyError | null;
    /** The served model's name. */
    get model(): string | undefined;
    /** The server's limits, by name. */
    get limits(): Record<string, number>;
    /** The names of the tools in force: of `open.tools`, or what the session was opened with before. */
    get toolNames(): string[];
    /** What the server says about how the session was opened: a chat template that rewrites earlier turns. */
    get notes(): string[];
    /** The branches that this client knows of. @returns {Branch[]} */
    get branches(): Branch[];
    /** A handle of a branch, whether it exists or not. @param {string} name */
    branch(name: string): Branch;
    /** A branch's length in tokens as far as this client has heard; undefined: it knows no such branch. @param {string} name */
    position(name: string): number | undefined;
    /**
     * Add input: raw text, chat messages (through the model's template), or token ids. `expect`: only if the branch is
     * that long. `logprobs`: how many likely tokens to tell beside each appended one. `images`: files of pictures, each of
     * which stands where the text, or a message's content, has U+FFFC. Of several branches the replies are a list.
     *
     * @overload
     * @param {string | ChatMessage[] | number[]} input
     * @param {{branch?: string, expect?: number, logprobs?: boolean | number} & Shown & Abortable} [options]
     * @returns {Promise<OkMessage>}
     *
     * @overload
     * @param {string | ChatMessage[] | number[]} input
     * @param {{branch: string[], expect?: number, logprobs?: boolean | number} & Shown & Abortable} options
     * @returns {Promise<OkMessage[]>}
     *
     * @param {string | ChatMessage[] | number[]} input
     * @param {{branch?: string | string[], expect?: number, logprobs?: boolean | number} & Shown & Abortable} [options]
     * @returns {Promise<OkMessage | OkMessage[]>}
     */
    append(input: string | ChatMessage[] | number[], options?: {
        branch?: string;
        expect?: number;
        logprobs?: boolean | number;
    } & Shown & Abortable): Promise<OkMessage>;
    /**
     * Add input: raw text, chat messages (through the model's template), or token ids. `expect`: only if the branch is
     * that long. `logprobs`: how many likely tokens to tell beside each appended one. `images`: files of pictures, each of
     * which stands where the text, or a message's content, has U+FFFC. Of several branches the replies are a list.
     *
     * @overload
     * @param {string | ChatMessage[] | number[]} input
     * @param {{branch?: string, expect?: number, logprobs?: boolean | number} & Shown & Abortable} [options]
     * @returns {Promise<OkMessage>}
     *
     * @overload
     * @param {string | ChatMessage[] | number[]} input
     * @param {{branch: string[], expect?: number, logprobs?: boolean | number} & Shown & Abortable} options
     * @returns {Promise<OkMessage[]>}
     *
     * @param {string | ChatMessage[] | number[]} input
     * @param {{branch?: string | string[], expect?: number, logprobs?: boolean | number} & Shown & Abortable} [options]
     * @returns {Promise<OkMessage | OkMessage[]>}
     */
    append(input: string | ChatMessage[] | number[], options: {
        branch: string[];
        expect?: number;
        logprobs?: boolean | number;
    } & Shown & Abortable): Promise<OkMessage[]>;
    /**
     * Generate. An array where `branch` is a list or `n` is given. Other options: the fields of `generate`, and a
     * constraint in short (`regex`, `json_schema`, `choices` or `grammar`).
     *
     * @overload
     * @param {Omit<GenerateFields, "n" | "as"> & Short & Abortable & {branch?: string}} [options]
     * @returns {Generation}
     *
     * @overload
     * @param {GenerateFields & Short & Abortable & ({branch: string[]} | {n: number, branch?: string})} options
     * @returns {Generation[]}
     *
     * @param {GenerateFields & Short & Abortable & {branch?: string | string[]}} [options]
     * @returns {Generation | Generation[]}
     */
    generate(options?: Omit<GenerateFields, "n" | "as"> & Short & Abortable & {
        branch?: string;
    }): Generation;
    /**
     * Generate. An array where `branch` is a list or `n` is given. Other options: the fields of `generate`, and a
     * constraint in short (`regex`, `json_schema`, `choices` or `grammar`).
     *
     * @overload
     * @param {Omit<GenerateFields, "n" | "as"> & Short & Abortable & {branch?: string}} [options]
     * @returns {Generation}
     *
     * @overload
     * @param {GenerateFields & Short & Abortable & ({branch: string[]} | {n: number, branch?: string})} options
     * @returns {Generation[]}
     *
     * @param {GenerateFields & Short & Abortable & {branch?: string | string[]}} [options]
     * @returns {Generation | Generation[]}
     */
    generate(options: GenerateFields & Short & Abortable & ({
        branch: string[];
    } | {
        n: number;
        branch?: string;
    })): Generation[];
    /**
     * Append the likeliest of several texts. Its result has `text`, `choice` (its index) and `scores`. An array where
     * `branch` is a list.
     *
     * @overload
     * @param {string[]} choices
     * @param {SelectFields & Abortable & {branch?: string}} [options]
     * @returns {Generation}
     *
     * @overload
     * @param {string[]} choices
     * @param {SelectFields & Abortable & {branch: string[]}} options
     * @returns {Generation[]}
     *
     * @param {string[]} choices
     * @param {SelectFields & Abortable & {branch?: string | string[]}} [options]
     * @returns {Generation | Generation[]}
     */
    select(choices: string[], options?: SelectFields & Abortable & {
        branch?: string;
    }): Generation;
    /**
     * Append the likeliest of several texts. Its result has `text`, `choice` (its index) and `scores`. An array where
     * `branch` is a list.
     *
     * @overload
     * @param {string[]} choices
     * @param {SelectFields & Abortable & {branch?: string}} [options]
     * @returns {Generation}
     *
     * @overload
     * @param {string[]} choices
     * @param {SelectFields & Abortable & {branch: string[]}} options
     * @returns {Generation[]}
     *
     * @param {string[]} choices
     * @param {SelectFields & Abortable & {branch?: string | string[]}} [options]
     * @returns {Generation | Generation[]}
     */
    select(choices: string[], options: SelectFields & Abortable & {
        branch: string[];
    }): Generation[];
    /** Children named `as` at the head of `branch`, or at position `at`; `branch` null: new roots.
     *  @param {string[]} as @param {{branch?: string | null, at?: number} & Abortable} [options]
     *  @returns {Promise<OkMessage>} */
    fork(as: string[], { branch, at, signal }?: {
        branch?: string | null;
        at?: number;
    } & Abortable): Promise<OkMessage>;
    /** Move the head back: `to` a position, or by `turns` appended turns.
     *  @param {{branch?: string, to?: number, turns?: number} & Abortable} where @returns {Promise<OkMessage>} */
    rollback({ branch, to, turns, signal }: {
        branch?: string;
        to?: number;
        turns?: number;
    } & Abortable): Promise<OkMessage>;
    /** Stop generations on branches, or ops by id; without both: all of this session's. `subtree`: with all that was
     *  forked off the branches, and every op that waits there.
     *  @param {{branch?: string | string[], ops?: number[], subtree?: boolean}} [what] @returns {Promise<OkMessage>} */
    cancel({ branch, ops, subtree }?: {
        branch?: string | string[];
        ops?: number[];
        subtree?: boolean;
    }): Promise<OkMessage>;
    /** What the branches `from` generated last becomes input of `branch`; then they are dropped.
     *  @param {string[]} from @param {JoinFields & Abortable & {branch?: string}} [options] @returns {Promise<OkMessage>} */
    join(from: string[], { branch, signal, ...options }?: JoinFields & Abortable & {
        branch?: string;
    }): Promise<OkMessage>;
    /** Keep the best of the branches `from`, once their generations have ended, and drop the others. The reply's
     *  `result` has `kept`, `dropped` and `scores`. `into`: names for the winners, the best first.
     *  @param {string[]} from
     *  @param {PruneFields & Abortable & {into?: string | string[], score_from?: string[]}} [options]
     *  @returns {Promise<OkMessage>} */
    prune(from: string[], { signal, ...options }?: PruneFields & Abortable & {
        into?: string | string[];
        score_from?: string[];
    }): Promise<OkMessage>;
    /** The branches as the server sees them, or one; `text` and `tokens` add their turns.
     *  @param {{branch?: string, text?: boolean, tokens?: boolean} & Abortable} [options]
     *  @returns {Promise<StateMessage>} */
    tree({ branch, text, tokens, signal }?: {
        branch?: string;
        text?: boolean;
        tokens?: boolean;
    } & Abortable): Promise<StateMessage>;
    /** Rename a branch, keep its KV warm, or attach a JSON object; without `branch`: to the session.
     *  @param {{branch?: string, name?: string, retain_s?: number, persist?: "none" | "lazy" | "sync", meta?: Record<string, unknown>,
     *    hints?: KvHints} & Abortable} fields @returns {Promise<OkMessage>} */
    set({ signal, ...fields }: {
        branch?: string;
        name?: string;
        retain_s?: number;
        persist?: "none" | "lazy" | "sync";
        meta?: Record<string, unknown>;
        hints?: KvHints;
    } & Abortable): Promise<OkMessage>;
    /** The session as one file, with all its branches: `connect(url, { import: file })` makes a new one of it. Rejects with
     *  Conflict while ops run, LimitExceeded if it does not fit into a frame.
     *  @param {Abortable} [options] @returns {Promise<Uint8Array<ArrayBuffer>>} */
    export({ signal }?: Abortable): Promise<Uint8Array<ArrayBuffer>>;
    /** Release a branch, or a list of them. @param {string | string[]} branch @param {Abortable} [options]
     *  @returns {Promise<OkMessage | OkMessage[]>} */
    drop(branch: string | string[], { signal }?: Abortable): Promise<OkMessage | OkMessage[]>;
    /** Flow control: let the server deliver text of a branch up to this position. @param {string} branch @param {number} upto */
    credit(branch: string, upto: number): void;
    /**
     * Ops that go out in one frame or not at all: those that `queue` calls. Without it, ops of one turn of the event
     * loop go out together as far as the server's limits allow. Returns what `queue` returns.
     *
     * @template T @param {() => T} queue @returns {T}
     */
    frame<T>(queue: () => T): T;
    /**
     * A program as it is on the wire: ops without ids, in one frame. For each: its Generation (a list for several
     * branches), or the promise of its reply.
     *
     * @param {NewOp[]} ops
     * @returns {(Promise<OkMessage | OkMessage[]> | Generation | Generation[])[]}
     */
    send(ops: NewOp[]): (Promise<OkMessage | OkMessage[]> | Generation | Generation[])[];
    /** Generations under way: those of this session, and those that went on while a page was loaded again.
     *  @returns {Generation[]} */
    running(): Generation[];
    /** What others do to the session, and their text, as it comes. The last 1,024 wait for the reader.
     *  @returns {AsyncGenerator<Note, void, void>} */
    events(): AsyncGenerator<Note, void, void>;
    /** End the session on the server (`keep`: only leave it), and here. Never rejects. @param {{keep?: boolean}} [options]
     * @returns {Promise<boolean>} whether the server has confirmed it: if not, it may still keep the session */
    close({ keep }?: {
        keep?: boolean;
    }): Promise<boolean>;
    /** Try again now instead of waiting. */
    reconnect(): void;
    /** Names for children that nobody has. The client's name is in them: others may fork the same branch.
     *  @param {string} parent @param {number} count @returns {string[]} */
    freshNames(parent: string, count: number): string[];
    /** For `Generation.cancel`. @param {Ticket} ticket @param {string} branch @returns {Promise<void>} */
    withdraw(ticket: Ticket, branch: string): Promise<void>;
}
export {};
