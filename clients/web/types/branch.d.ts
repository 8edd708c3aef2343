/** What a program holds of a branch: `Branch`, the ops of a session for one name. */
import type { BranchState, ChatMessage, GenerateFields, JoinFields, KvHints, OkMessage, PruneFields, Role, SelectFields } from "./protocol.js";
import type { Generation } from "./generation.js";
import type { Abortable, Session, Short, Shown } from "./session.js";
export type Alone = Omit<GenerateFields, "n" | "as"> & Short & Abortable;
/** A branch by name. Cheap: make as many as you like; the server has the branch itself. */
export declare class Branch {
    session: Session;
    name: string;
    /** @param {Session} session @param {string} name */
    constructor(session: Session, name: string);
    /** Its length in tokens as far as this client has heard; undefined: no such branch is known. */
    get position(): number | undefined;
    /** Add input: raw text, chat messages (through the model's template), or token ids. `images`: see `Session.append`.
     *  @param {string | ChatMessage[] | number[]} input
     *  @param {{expect?: number, logprobs?: boolean | number} & Shown & Abortable} [options]
     *  @returns {Promise<OkMessage>} */
    append(input: string | ChatMessage[] | number[], options?: {
        expect?: number;
        logprobs?: boolean | number;
    } & Shown & Abortable): Promise<OkMessage>;
    /** Append one chat turn. `images`: before the text, or where it has U+FFFC.
     *  @param {string} content @param {{role?: Role} & Shown & Abortable} [options] */
    say(content: string, { role, ...options }?: {
        role?: Role;
    } & Shown & Abortable): Promise<OkMessage>;
    /** Append a chat turn and generate the answer, in one frame. `images`: as of `say`.
     *  @param {string} content @param {{role?: Role} & Shown & Alone} [options]
     *  @returns {Generation} */
    chat(content: string, { role, images, ...options }?: {
        role?: Role;
    } & Shown & Alone): Generation;
    /** Generate. @param {Alone} [options] @returns {Generation} */
    generate(options?: Alone): Generation;
    /** Fork `n` children and generate on each. `as`: their names.
     *  @param {number} n @param {GenerateFields & Short & Abortable} [options] @returns {Generation[]} */
    generateMany(n: number, options?: GenerateFields & Short & Abortable): Generation[];
    /** Append the likeliest of several texts. The result has `text`, `choice` (its index) and `scores`.
     *  @param {string[]} choices @param {SelectFields & Abortable} [options] @returns {Generation} */
    select(choices: string[], options?: SelectFields & Abortable): Generation;
    /** Children that share this branch up to its head, or up to position `at`.
     *  @param {string | string[]} names @param {{at?: number} & Abortable} [options] */
    fork(names: string | string[], options?: {
        at?: number;
    } & Abortable): Promise<Branch[]>;
    /** What each source generated last, once it has, becomes input of this branch; then the sources are dropped.
     *  @param {(Branch | string)[]} sources @param {JoinFields & Abortable} [options] */
    join(sources: (Branch | string)[], options?: JoinFields & Abortable): Promise<OkMessage>;
    /** The best source takes this branch's place; all sources go. See `Session.prune`.
     *  @param {(Branch | string)[]} sources
     *  @param {Omit<PruneFields, "k"> & {score_from?: (Branch | string)[]} & Abortable} [options] */
    prune(sources: (Branch | string)[], { score_from: judges, ...options }?: Omit<PruneFields, "k"> & {
        score_from?: (Branch | string)[];
    } & Abortable): Promise<OkMessage>;
    /** Move the head back: `to` a position, or by `turns` appended turns.
     *  @param {{to?: number, turns?: number} & Abortable} where */
    rollback(where: {
        to?: number;
        turns?: number;
    } & Abortable): Promise<OkMessage>;
    /** Rename, keep its KV warm for a while, or attach facts of your own.
     *  @param {{name?: string, retain_s?: number, persist?: "none" | "lazy" | "sync", meta?: Record<string, unknown>, hints?: KvHints} & Abortable} fields */
    set(fields: {
        name?: string;
        retain_s?: number;
        persist?: "none" | "lazy" | "sync";
        meta?: Record<string, unknown>;
        hints?: KvHints;
    } & Abortable): Promise<OkMessage>;
    /** Release the branch. @param {Abortable} [options] */
    drop(options?: Abortable): Promise<OkMessage[] | OkMessage>;
    /** Stop its generations, which end with what they have. `subtree`: and all that runs or waits on it and on
     *  what was forked off it. @param {{subtree?: boolean}} [options] */
    cancel({ subtree }?: {
        subtree?: boolean;
    }): Promise<OkMessage>;
    /** The branch as the server sees it; `text` and `tokens` add its turns.
     *  @param {{text?: boolean, tokens?: boolean} & Abortable} [options] @returns {Promise<BranchState>} */
    tree(options?: {
        text?: boolean;
        tokens?: boolean;
    } & Abortable): Promise<BranchState>;
    /** Flow control: let the server deliver text up to this position. @param {number} upto */
    credit(upto: number): void;
}
/** The names of branches, or of branches that an op of the same frame makes. @param {(Branch | string)[]} branches */
export declare function namesOf(branches: (Branch | string)[]): string[];
