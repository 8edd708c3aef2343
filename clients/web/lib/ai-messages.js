/**
 * Between the AI SDK's UI messages and chat turns: messages to turns, deltas to UI message chunks. Pure.
 *
 * The gateway does the same for /v1/ai (`actors/gateway/apis/ai/`).
 */

import { BadRequest } from "./errors.js";

/** @import { UIMessage, UIMessageChunk } from "ai" */
/** @import { Result } from "./generation.js" */
/** @import { ChatMessage } from "./protocol.js" */
/** @import { TextDelta } from "./stream.js" */

/** @typedef {ChatMessage & {images?: string[]}} Turn  A turn with its pictures: files in base64, or addresses that are. */

const MARK = "\ufffc"; // where a picture stands in text
const RESULTS = ["output-available", "output-error", "output-denied"];
/** @type {Record<string, "stop" | "length" | "tool-calls">} */
const FINISH = { stop: "stop", length: "length", tool: "tool-calls", deadline: "length" };

/**
 * The conversation as chat turns. Calls that have no result yet are left out. Throws BadRequest that names the place.
 *
 * @param {UIMessage[]} messages @param {string} [system] @returns {Turn[]}
 */
export function turnsOf(messages, system) {
  /** @type {Turn[]} */
  const turns = system ? [{ role: "system", content: system }] : [];
  messages.forEach(({ role, parts }, i) => {
    if (role === "assistant") turns.push(...assistant(parts));
    else {
      /** @type {string[]} */ const images = [];
      const pieces = parts.map((part, j) => said(part, `messages[${i}].parts[${j}]`, images));
      if (!images.length) turns.push({ role, content: pieces.join("") });
      else turns.push({ role, content: pieces.map((piece) => (piece === MARK ? piece : piece.replaceAll(MARK, "\ufffd"))).join(""), images });
    }
  });
  return turns;
}

/** @param {UIMessage["parts"]} parts @returns {ChatMessage[]} */
function assistant(parts) {
  /** @type {any[][]} */
  const steps = [[]];
  for (const part of parts) {
    if (part.type === "step-start") steps.push([]);
    else steps.at(-1)?.push(part);
  }
  return steps.flatMap((step) => {
    const text = step.filter(({ type }) => type === "text").map((part) => part.text).join("");
    const calls = step.filter((part) => toolOf(part) && RESULTS.includes(part.state));
    if (!text && !calls.length) return [];
    return [
      spoken(text, calls.map((part) => ({ id: part.toolCallId, name: toolOf(part), input: part.input }))),
      ...calls.map((part) => /** @type {ChatMessage} */ ({
        role: "tool", content: resultOf(part), name: toolOf(part), tool_call_id: part.toolCallId })),
    ];
  });
}

/** A turn of the assistant. @param {string} content @param {{id: string, name: string, input: unknown}[]} calls
 *  @returns {ChatMessage} */
function spoken(content, calls) {
  const given = calls.map(({ id, name, input }) => ({
    id, type: "function", function: { name, arguments: JSON.stringify(input ?? {}) } }));
  return { role: "assistant", content, ...(given.length && { tool_calls: given }) };
}

/** @param {any} part */
function toolOf(part) {
  return part.type === "dynamic-tool" ? part.toolName : part.type.startsWith("tool-") ? part.type.slice(5) : "";
}

/** @param {any} part */
function resultOf({ state, output, errorText }) {
  if (state === "output-denied") return "The user did not allow this call.";
  if (state === "output-error") return errorText || "The call failed.";
  return typeof output === "string" ? output : JSON.stringify(output ?? null);
}

/** @param {any} part @param {string} where @param {string[]} images  which its picture joins */
function said(part, where, images) {
  if (part.type === "text") return part.text === MARK ? "\ufffd" : part.text;
  if (part.type !== "file") return ""; // for the eye: data-*, sources
  const picture = part.mediaType?.startsWith("image/") && pictureOf(part.url ?? "");
  if (picture) {
    images.push(picture);
    return MARK;
  }
  if (!part.mediaType?.startsWith("text") || !part.url?.startsWith("data:")) {
    throw new BadRequest(`\`${where}\` is a file of the type ${part.mediaType}: send text files and pictures as data URLs`);
  }
  return `\n\n${part.filename ?? "File"}:\n${fromDataUrl(part.url)}`;
}

/** The file, or the address of one that the server may fetch, in base64; "": neither. @param {string} url */
function pictureOf(url) {
  if (/^https?:\/\/[!-~]+$/i.test(url)) return btoa(url);
  return /^data:image\/[a-z]+;base64,([A-Za-z0-9+/]+={0,2})$/.exec(url)?.[1] ?? "";
}

/** @param {string} url */
function fromDataUrl(url) {
  const [head = "", ...rest] = url.split(",");
  const data = decodeURIComponent(rest.join(","));
  if (!head.endsWith(";base64")) return data;
  return new TextDecoder().decode(Uint8Array.from(atob(data), (char) => char.charCodeAt(0)));
}

/** Makes chunks of one generation. The session must have been opened with `parts`. */
export class Chunker {
  #began = false;
  /** @type {{kind: "text" | "reasoning", id: string} | null} */ #open = null;
  #blocks = 0;
  #blank = ""; // white space that may turn out to stand between calls
  #text = "";
  /** @type {Map<number, {id: string, name: string, text: string}>} */ #calls = new Map();

  /** @param {string} messageId  what the client is to call the answer */
  constructor(messageId) {
    this.messageId = messageId;
  }

  /** @param {TextDelta} delta @returns {UIMessageChunk[]} */
  said(delta) {
    const chunks = this.#begin();
    for (const part of delta.parts ?? [{ kind: "text", text: delta.text }]) {
      if (part.kind === "text" || part.kind === "reasoning") this.#say(chunks, part.kind, part.text);
      else if (part.kind === "call") this.#call(chunks, /** @type {import("./protocol.js").Part} */ (part));
    }
    return chunks;
  }

  /** It has ended. @param {Result} done @returns {UIMessageChunk[]} */
  ended(done) {
    const chunks = this.#begin();
    this.#close(chunks);
    const told = new Set([...this.#calls.values()].map(({ id }) => id));
    for (const { id, function: { name, arguments: text } } of done.tool_calls ?? []) {
      if (!told.delete(id)) chunks.push({ type: "tool-input-start", toolCallId: id, toolName: name });
      chunks.push({ type: "tool-input-available", toolCallId: id, toolName: name, input: JSON.parse(text) });
    }
    for (const { id, name, text } of this.#calls.values()) {
      if (told.has(id)) chunks.push({ type: "tool-input-error", toolCallId: id, toolName: name, input: text, errorText: "the call was cut, or is broken" });
    }
    chunks.push({ type: "finish-step" });
    if (done.reason === "cancelled") chunks.push({ type: "abort" });
    const { prompt, cached, output, queue_ms: queueMs } = done.usage;
    const usage = { inputTokens: prompt, cachedInputTokens: cached, outputTokens: output, totalTokens: prompt + output, queueMs };
    chunks.push({ type: "finish", finishReason: FINISH[done.reason] ?? "other", messageMetadata: { usage } });
    return chunks;
  }

  /** The turn that was said, as `turnsOf` reads it off the message that becomes of the chunks. @param {Result} done */
  turn(done) {
    const calls = (done.tool_calls ?? []).map(({ id, function: { name, arguments: text } }) => ({ id, name, input: JSON.parse(text) }));
    return spoken(this.#text, calls);
  }

  /** @returns {UIMessageChunk[]} */
  #begin() {
    if (this.#began) return [];
    this.#began = true;
    return [{ type: "start", messageId: this.messageId }, { type: "start-step" }];
  }

  /** @param {UIMessageChunk[]} chunks @param {"text" | "reasoning"} kind @param {string} text */
  #say(chunks, kind, text) {
    if (this.#open?.kind !== kind) {
      text = this.#blank + text;
      if (!text.trim()) {
        this.#blank = text;
        return;
      }
      this.#close(chunks);
      this.#open = { kind, id: `${kind}-${this.#blocks++}` };
      chunks.push({ type: `${kind}-start`, id: this.#open.id });
    }
    this.#blank = "";
    if (kind === "text") this.#text += text;
    chunks.push({ type: `${kind}-delta`, id: this.#open.id, delta: text });
  }

  /** @param {UIMessageChunk[]} chunks @param {import("./protocol.js").Part} part */
  #call(chunks, { call: number = 0, id, name, arguments: text }) {
    this.#close(chunks);
    if (name !== undefined) {
      this.#calls.set(number, { id: id ?? `call-${number}`, name, text: "" });
      chunks.push({ type: "tool-input-start", toolCallId: id ?? `call-${number}`, toolName: name });
    }
    const call = this.#calls.get(number);
    if (!call || !text) return;
    call.text += text;
    chunks.push({ type: "tool-input-delta", toolCallId: call.id, inputTextDelta: text });
  }

  /** @param {UIMessageChunk[]} chunks */
  #close(chunks) {
    this.#blank = "";
    if (this.#open) chunks.push({ type: `${this.#open.kind}-end`, id: this.#open.id });
    this.#open = null;
  }
}
