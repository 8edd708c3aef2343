/**
 * The answers to one `tree`, put together: whole histories again, whatever was sent once or in parts.
 *
 * A server sends as much as fits (`next` says where to go on), and the turns that a fork shares with its parent only
 * there (`turns_from`). Pure.
 */
import type { StateMessage } from "./protocol.js";
/** @import { BranchState, StateMessage } from "./protocol.js" */
/** One `state` that shows everything. @param {StateMessage[]} pages  the answers, in order; at least one
 *  @returns {StateMessage} */
export declare function wholeTree(pages: StateMessage[]): StateMessage;
