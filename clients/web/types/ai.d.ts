/**
 * The Vercel AI SDK (`ai` v7) over `ramify.v1`: a `ChatTransport` that keeps branches.
 *
 *     import { RamifyChatTransport } from "ramify-client/ai";
 *     const transport = new RamifyChatTransport({ url: "ws://127.0.0.1:8765" });
 *     const { messages, sendMessage, regenerate } = useChat({ transport });
 *
 * A turn sends and computes its own text alone. An edit or a retry forks where the conversations part; the branch
 * before stays, and going back to it costs nothing. Without this, `WebSocketChatTransport` of the package `ai`
 * works as it is: `new WebSocketChatTransport({ url: "ws://127.0.0.1:8765/v1/ai" })`.
 */
import type { ChatTransport, UIMessage, UIMessageChunk } from "ai";
import type { GenerateFields } from "./protocol.js";
import type { Options, Session, Short } from "./session.js";
export type TransportOptions = {
    /**
     * the server's address, as for `connect`
     */
    url: string;
    /**
     * what conversations begin with
     */
    system?: string;
    /**
     * functions that the model may call, as for `open.tools`; the AI SDK runs them
     */
    tools?: object[];
    /**
     * fields of `generate`; the `body` of a request adds to them
     */
    generate?: Omit<GenerateFields, "n" | "as"> & Short;
    /**
     * that are kept (256); the one that was not used for longest goes
     */
    mostBranches?: number;
    /**
     * one that is open (with `parts`), instead of `url` and the rest
     */
    session?: Session;
};
/**
 * See the module. One transport is one session, for any number of chats.
 *
 * @template {UIMessage} [M=UIMessage]
 * @implements {ChatTransport<M>}
 */
export declare class RamifyChatTransport<M extends UIMessage = UIMessage> implements ChatTransport<M> {
    #private;
    /** The session beneath: its branches, events, errors. */
    session: Session;
    /** A stream of `reconnectToStream` begins with the answer's `start`. */
    resumeStreamIsReplay: boolean;
    /** @param {TransportOptions & Options} options */
    constructor({ url, system, tools, generate, mostBranches, session, ...options }: TransportOptions & Options);
    /**
     * Answer the last message. See `ChatTransport`.
     *
     * @param {Parameters<ChatTransport<M>["sendMessages"]>[0]} request
     * @returns {Promise<ReadableStream<UIMessageChunk>>}
     */
    sendMessages({ chatId, messages, abortSignal, body }: Parameters<ChatTransport<M>["sendMessages"]>[0]): Promise<ReadableStream<UIMessageChunk>>;
    /**
     * The answer of a chat that is under way; null: there is none. Where the session is kept in `storage`, a page that
     * was loaded again finds it as well. See `ChatTransport`.
     *
     * @param {Parameters<ChatTransport<M>["reconnectToStream"]>[0]} request
     * @returns {Promise<ReadableStream<UIMessageChunk> | null>}
     */
    reconnectToStream({ chatId, abortSignal }: Parameters<ChatTransport<M>["reconnectToStream"]>[0]): Promise<ReadableStream<UIMessageChunk> | null>;
    /** The branch on which a conversation is, as far as it is known; undefined: nothing of it is.
     *  @param {M[]} messages @returns {string | undefined} */
    branchOf(messages: M[]): string | undefined;
    /** End the session, which stops what runs. */
    close(): Promise<void>;
}
