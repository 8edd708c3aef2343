/**
 * Between the AI SDK's UI messages and chat turns: messages to turns, deltas to UI message chunks. Pure.
 *
 * The gateway does the same for /v1/ai (`actors/gateway/apis/ai/`).
 */
import type { UIMessage, UIMessageChunk } from "ai";
import type { Result } from "./generation.js";
import type { ChatMessage } from "./protocol.js";
import type { TextDelta } from "./stream.js";
export type Turn = ChatMessage & {
    images?: string[];
};
/**
 * The conversation as chat turns. Calls that have no result yet are left out. Throws BadRequest that names the place.
 *
 * @param {UIMessage[]} messages @param {string} [system] @returns {Turn[]}
 */
export declare function turnsOf(messages: UIMessage[], system?: string): Turn[];
/** Makes chunks of one generation. The session must have been opened with `parts`. */
export declare class Chunker {
    #private;
    messageId: string;
    /** @param {string} messageId  what the client is to call the answer */
    constructor(messageId: string);
    /** @param {TextDelta} delta @returns {UIMessageChunk[]} */
    said(delta: TextDelta): UIMessageChunk[];
    /** It has ended. @param {Result} done @returns {UIMessageChunk[]} */
    ended(done: Result): UIMessageChunk[];
    /** The turn that was said, as `turnsOf` reads it off the message that becomes of the chunks. @param {Result} done */
    turn(done: Result): ChatMessage;
}
