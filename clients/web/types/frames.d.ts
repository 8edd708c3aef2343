/** Ops as JSON, and what may go into one frame. Pure. */
/**
 * The JSON text of an op without its id. Throws BadRequest for what JSON would change without a word.
 *
 * @param {object} op
 */
export declare function encoded(op: object): string;
/** The text of a frame. @param {{id?: number, json: string}[]} tickets */
export declare function frameOf(tickets: {
    id?: number;
    json: string;
}[]): string;
/** Bytes of an op in a frame, with an id of any length. @param {string} json */
export declare function bytes(json: string): number;
/** How many ops at the beginning of a frame fit into `limits`. @param {{json: string}[]} tickets
 *  @param {Record<string, number>} limits */
export declare function fitting(tickets: {
    json: string;
}[], { ops_per_frame: most, frame_bytes: room }: Record<string, number>): number;
/** Whether an op reads or changes one of these branches. @param {import("./protocol.js").Op} op @param {Set<string>} names */
export declare function touches(op: import("./protocol.js").Op, names: Set<string>): boolean;
/** The branches that an op names. @param {Omit<import("./protocol.js").Op, "id">} op @returns {string[]} */
export declare function branchesOf({ type, branch, as, from, into, score_from: judges, name }: Omit<import("./protocol.js").Op, "id">): string[];
