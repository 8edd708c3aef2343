/**
 * The branches of a session as one client knows them: names, lengths, how much text is here. Pure.
 *
 * A reply or event waits for the deltas of its branch, so changes of different branches may be told in
 * another order than they were made. Each is applied when it comes: the server tells of a fork before it
 * tells of the children.
 */
import type { BranchState, DoneMessage, EventMessage, OkMessage, Op } from "./protocol.js";
export type Head = {
    /**
     * the branch's length in tokens
     */
    position: number;
    /**
     * how far its text is here, which is where a resume starts
     */
    received: number;
};
/** @import { BranchState, DoneMessage, EventMessage, OkMessage, Op, OpResult } from "./protocol.js" */
/**
 * @typedef {object} Head
 * @property {number} position  the branch's length in tokens
 * @property {number} received  how far its text is here, which is where a resume starts
 */
/** The table of branches. */
export declare class Heads {
    #private;
    /** @type {Map<string, Head>} */
    byName: Map<string, Head>;
    /** The newest change of the tree that was told. @type {number | undefined} */
    revision: number | undefined;
    /** For `open.have`: where each branch's text goes on. @returns {Record<string, number>} */
    have(): Record<string, number>;
    /** The branch; a new entry if it was not known. @param {string} name */
    get(name: string): Head;
    /**
     * A `state` answered `open`: it has all branches there are. The text of a branch that was not in `have`
     * comes from the running generation's start on; of one in `asked` it comes from position 0.
     *
     * @param {BranchState[]} branches @param {number} revision @param {Set<string>} asked
     */
    attached(branches: BranchState[], revision: number, asked: Set<string>): void;
    /** Whether a reply tells of something that the last `state` did not include. @param {number} [revision] */
    news(revision?: number): boolean;
    /** An op is done. @param {Omit<Op, "id">} op @param {OkMessage} ok */
    applied(op: Omit<Op, "id">, { branch, position, revision, result }: OkMessage): void;
    /** A generation is over. Its branch may have gone since, if `done` is sent again. @param {DoneMessage} done */
    ended({ branch, position, revision, rebased }: DoneMessage): void;
    /** Another client changed the tree. @param {EventMessage} event */
    noted(event: EventMessage): void;
}
