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

import { Chunker, turnsOf } from "./ai-messages.js";
import { Turns } from "./ai-tree.js";
import { BadRequest, ConnectionLost, NoBranch } from "./errors.js";
import { connect } from "./session.js";

/** @import { ChatTransport, UIMessage, UIMessageChunk } from "ai" */
/** @import { Generation } from "./generation.js" */
/** @import { GenerateFields } from "./protocol.js" */
/** @import { Turn } from "./ai-messages.js" */
/** @import { Abortable, Options, Session, Short } from "./session.js" */

/**
 * @typedef {object} TransportOptions
 * @property {string} url  the server's address, as for `connect`
 * @property {string} [system]  what conversations begin with
 * @property {object[]} [tools]  functions that the model may call, as for `open.tools`; the AI SDK runs them
 * @property {Omit<GenerateFields, "n" | "as"> & Short} [generate]  fields of `generate`; the `body` of a request adds to them
 * @property {number} [mostBranches]  that are kept (256); the one that was not used for longest goes
 * @property {Session} [session]  one that is open (with `parts`), instead of `url` and the rest
 */

/** An answer under way, for who comes back to it. */
class Answer {
  /** @type {UIMessageChunk[]} */ said = [];
  /** @type {Set<ReadableStreamDefaultController<UIMessageChunk>>} */ readers = new Set();

  /** @param {string} branch @param {Generation} generation @param {Chunker} chunker */
  constructor(branch, generation, chunker) {
    this.branch = branch;
    this.generation = generation;
    this.chunker = chunker;
  }

  /** @param {UIMessageChunk[]} chunks */
  say(chunks) {
    for (const chunk of chunks) {
      this.said.push(chunk);
      for (const reader of this.readers) reader.enqueue(chunk);
    }
  }

  /** @param {unknown} [error] */
  end(error) {
    for (const reader of this.readers) {
      if (error === undefined) reader.close();
      else reader.error(error);
    }
    this.readers.clear();
  }

  /** All of it, from the beginning. Who stops reading leaves it running; an abort stops it.
   *  @param {AbortSignal} [signal] @returns {ReadableStream<UIMessageChunk>} */
  stream(signal) {
    /** @type {ReadableStreamDefaultController<UIMessageChunk>} */ let reader;
    return new ReadableStream({
      start: (controller) => {
        reader = controller;
        for (const chunk of this.said) reader.enqueue(chunk);
        this.readers.add(reader);
        const abort = () => this.generation.cancel().catch(() => {});
        if (signal?.aborted) abort();
        signal?.addEventListener("abort", abort, { once: true });
      },
      cancel: () => {
        this.readers.delete(reader);
      },
    });
  }
}

/**
 * See the module. One transport is one session, for any number of chats.
 *
 * @template {UIMessage} [M=UIMessage]
 * @implements {ChatTransport<M>}
 */
export class RamifyChatTransport {
  /** A stream of `reconnectToStream` begins with the answer's `start`. */
  resumeStreamIsReplay = true;
  #options;
  #storage;
  #turns = new Turns();
  /** @type {Map<string, Answer>} by chat */ #answers = new Map();
  #made = 0;

  /** @param {TransportOptions & Options} options */
  constructor({ url, system, tools, generate = {}, mostBranches = 256, session, ...options }) {
    this.#options = { system, generate, mostBranches };
    this.#storage = options.storage ?? null;
    /** The session beneath: its branches, events, errors. */
    this.session = session ?? connect(url, { retry: "always", renew: true, ...options, open: { ...options.open, parts: true, ...(tools && { tools }) } });
    this.session.addEventListener("lost", () => this.#turns.clear());
    this.session.addEventListener("state", () => { // a restart has lost what came last: it is told again from the text
      if (this.session.state?.lost) this.#turns.clear();
    });
  }

  /**
   * Answer the last message. See `ChatTransport`.
   *
   * @param {Parameters<ChatTransport<M>["sendMessages"]>[0]} request
   * @returns {Promise<ReadableStream<UIMessageChunk>>}
   */
  async sendMessages({ chatId, messages, abortSignal, body }) {
    abortSignal?.throwIfAborted();
    const turns = turnsOf(messages, this.#options.system);
    const last = turns.at(-1)?.role;
    if (last !== "user" && last !== "tool") throw new BadRequest("the last message must be a user's, or hold results of tools");
    await this.#room();
    abortSignal?.throwIfAborted();
    const fields = /** @type {GenerateFields & Short & Abortable} */ ({ ...this.#options.generate, ...body });
    const { branch, generation } = this.#ask(turns, fields);
    const before = messages.at(-1);
    const messageId = before?.role === "assistant" ? before.id : `msg-${this.session.client}-${++this.#made}`;
    const answer = new Answer(branch, generation, new Chunker(messageId));
    const stream = answer.stream(abortSignal);
    this.#follow(chatId, answer, turns);
    return stream;
  }

  /**
   * The answer of a chat that is under way; null: there is none. Where the session is kept in `storage`, a page that
   * was loaded again finds it as well. See `ChatTransport`.
   *
   * @param {Parameters<ChatTransport<M>["reconnectToStream"]>[0]} request
   * @returns {Promise<ReadableStream<UIMessageChunk> | null>}
   */
  async reconnectToStream({ chatId, abortSignal }) {
    const answer = this.#answers.get(chatId);
    if (answer) return answer.stream(abortSignal);
    const kept = JSON.parse(this.#storage?.getItem(place(chatId)) ?? "null");
    if (!kept) return null;
    await this.session.ready;
    const generation = this.session.running().find(({ branch }) => branch === kept.branch);
    if (!generation) {
      this.#storage?.removeItem(place(chatId));
      return null;
    }
    const found = new Answer(kept.branch, generation, new Chunker(kept.messageId));
    const stream = found.stream(abortSignal);
    this.#follow(chatId, found, null);
    return stream;
  }

  /** The branch on which a conversation is, as far as it is known; undefined: nothing of it is.
   *  @param {M[]} messages @returns {string | undefined} */
  branchOf(messages) {
    return this.#turns.find(turnsOf(messages, this.#options.system)).place?.branch;
  }

  /** End the session, which stops what runs. */
  async close() {
    await this.session.close();
  }

  // ---

  /** Append what is new, and generate, in one frame. @param {Turn[]} turns
   *  @param {GenerateFields & Short & Abortable} fields */
  #ask(turns, fields) {
    const { session } = this;
    const { place: from, known } = this.#turns.find(turns);
    let branch = from?.branch ?? "";
    return session.frame(() => {
      /** @type {Promise<unknown>[]} */ const asked = [];
      if (!from || session.position(branch) !== from.position || this.#busy(branch)) {
        [branch = ""] = session.freshNames("chat", 1);
        asked.push(session.fork([branch], from ? { branch: from.branch, at: from.position } : { branch: null }));
      }
      this.#turns.use(branch);
      for (const [begin, end] of groups(turns, known)) {
        const told = turns.slice(begin, end);
        const images = told.flatMap((turn) => turn.images ?? []);
        const appended = session.append(told.map(({ images: _, ...turn }) => turn), { branch, ...(images.length && { images }) });
        asked.push(appended.then(({ position }) => { this.#turns.add(turns.slice(0, end), branch, position); }));
      }
      const generation = session.generate({ ...fields, branch });
      for (const each of asked) {
        each.catch((error) => {
          if (error instanceof NoBranch && from) this.#turns.drop(from.branch); // dropped by somebody else: begin anew
        });
      }
      return { branch, generation };
    });
  }

  /** @param {string} branch */
  #busy(branch) {
    return [...this.#answers.values()].some((answer) => answer.branch === branch);
  }

  /** Read a generation to its end. @param {string} chatId @param {Answer} answer @param {Turn[] | null} turns */
  async #follow(chatId, answer, turns) {
    const { branch, generation, chunker } = answer;
    this.#answers.set(chatId, answer);
    this.#storage?.setItem(place(chatId), JSON.stringify({ branch, messageId: chunker.messageId }));
    try {
      for await (const delta of generation) answer.say(chunker.said(delta));
      const done = await generation.result;
      if (turns) this.#turns.add([...turns, chunker.turn(done)], branch, done.position);
      answer.say(chunker.ended(done));
      answer.end();
      this.#forget(chatId, answer);
    } catch (error) {
      answer.end(error);
      this.#forget(chatId, answer, error instanceof ConnectionLost); // then it may still run, for the next page
    }
  }

  /** @param {string} chatId @param {Answer} answer @param {boolean} [noted]  it stays in the storage */
  #forget(chatId, answer, noted = false) {
    if (this.#answers.get(chatId) !== answer) return;
    this.#answers.delete(chatId);
    if (!noted) this.#storage?.removeItem(place(chatId));
  }

  /** Make room for one more branch. */
  async #room() {
    while (this.#turns.size >= this.#options.mostBranches) {
      const branch = this.#turns.oldest(new Set([...this.#answers.values()].map((answer) => answer.branch)));
      if (branch === undefined) return;
      this.#turns.drop(branch);
      await this.session.drop(branch).catch(() => {}); // it may be gone
    }
  }
}

/** Where a chat's answer is noted. @param {string} chatId */
function place(chatId) {
  return `ramify chat ${chatId}`;
}

/** What is appended at once: one turn, but all results of one step. @param {Turn[]} turns @param {number} from
 *  @returns {[number, number][]} */
function groups(turns, from) {
  /** @type {[number, number][]} */
  const found = [];
  for (let i = from; i < turns.length; i += 1) {
    const last = found.at(-1);
    if (last && turns[i]?.role === "tool" && turns[i - 1]?.role === "tool") last[1] = i + 1;
    else if (last && i - 1 === last[0] && turns[last[0]]?.role === "system") last[1] = i + 1; // a template may want both
    else found.push([i, i + 1]);
  }
  return found;
}
