/**
 * Which branch holds which conversation: a trie of chat turns, so that an edit or a retry goes on where the
 * conversations part, and nothing is computed or sent twice. Pure.
 */
import type { Turn } from "./ai-messages.js";
/** @import { Turn } from "./ai-messages.js" */
/** A turn that a branch holds: up to `position`, which is undefined while it is being appended. */
export declare class Place {
    branch: string;
    position: number | undefined;
    /** @type {Map<string, Place>} */ children: Map<string, Place>;
    /** @param {string} branch @param {number} [position] */
    constructor(branch: string, position?: number);
}
/** The turns of all conversations of a session. */
export declare class Turns {
    #private;
    /** How many branches it knows. */
    get size(): number;
    /**
     * Where a conversation goes on: the place of the last turn that is known with its position, and how many turns
     * that are.
     *
     * @param {Turn[]} turns @returns {{place: Place | null, known: number}}
     */
    find(turns: Turn[]): {
        place: Place | null;
        known: number;
    };
    /** A conversation's last turn is on this branch; `position` may come later. @param {Turn[]} turns
     *  @param {string} branch @param {number} [position] */
    add(turns: Turn[], branch: string, position?: number): Place;
    /** A branch is needed now. @param {string} branch */
    use(branch: string): void;
    /** The branch that was not used for longest, but for those that are `kept`. @param {Set<string>} kept */
    oldest(kept: Set<string>): string | undefined;
    /** A branch is gone: what it shared with others is found there, the rest is forgotten. @param {string} branch */
    drop(branch: string): void;
    /** The session is gone with all its branches. */
    clear(): void;
}
