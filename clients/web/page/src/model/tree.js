/**
 * A chat as a tree of messages: what a person did, nothing of it ever overwritten.
 *
 * An edit or a retry adds a sibling. What is shown is a path: at each message the child that was chosen last.
 * Where the messages are on the server (branch and position) is `place`; see `chat.js`. Pure: no DOM, no socket.
 *
 * @typedef {{epoch: number, branch: string, at?: number}} Place  `at`: the branch's length right behind the
 *   message, in tokens; not known before the server has answered. `epoch`: which of the chat's sessions.
 * @typedef {{id: string, parent: string | null, role: "user" | "assistant" | "tool", text: string, created: number,
 *   state: "done" | "running" | "failed", chosen?: string, gone?: boolean, place?: Place | null, op?: number,
 *   system?: string, files?: {name: string, text?: string, picture?: string, type?: string}[], calls?: object[], usage?: object, reason?: string,
 *   start?: number, error?: string, thoughtMs?: number, score?: number | null, ahead?: number, json?: boolean, schema?: object, outage?: boolean,
 *   corrected?: boolean, merged?: string[]}} Message  `json`: a JSON schema asked for it, which is `schema`.
 *   `outage`: the server restarted while it was written. A file has text, or is a `picture` in base64
 */

export class Tree {
  /** @param {Message[]} [messages] in any order @param {string} [chosen] the first message that is shown */
  constructor(messages = [], chosen = undefined) {
    /** @type {Map<string, Message>} */ this.messages = new Map(messages.map((each) => [each.id, each]));
    this.chosen = chosen;
    /** @type {Map<string | null, Message[]>} */ this.below = new Map();
    const order = [...messages].sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
    for (const each of order) this.#hang(each);
  }

  get(id) { return this.messages.get(id); }
  get size() { return this.messages.size; }

  /** Add a message below its parent and show it. @param {Omit<Message, "id" | "created" | "state">} fields @returns {Message} */
  add(fields) {
    const message = { id: unique(), created: Date.now(), state: "done", ...fields };
    this.messages.set(message.id, message);
    this.#hang(message);
    this.choose(message);
    return message;
  }

  /** Messages that answer `parent` (null: first messages) and were not deleted. @returns {Message[]} */
  children(parent) {
    return (this.below.get(parent?.id ?? null) ?? []).filter(({ gone }) => !gone);
  }

  parent(message) { return message.parent === null ? null : this.messages.get(message.parent) ?? null; }
  siblings(message) { return this.children(this.parent(message)); }

  /** The child that is shown. @returns {Message | undefined} */
  shown(parent) {
    const children = this.children(parent);
    const chosen = parent ? parent.chosen : this.chosen;
    return children.find(({ id }) => id === chosen) ?? children.at(-1);
  }

  /** What is shown, from the first message on. @returns {Message[]} */
  path() {
    const found = [];
    for (let next = this.shown(null); next; next = this.shown(next)) found.push(next);
    return found;
  }

  /** From the first message to this one. @returns {Message[]} */
  above(message) {
    const found = [];
    for (let each = message; each; each = this.parent(each)) found.push(each);
    return found.reverse();
  }

  /** Show this message. @returns {Message[]} those whose `chosen` has changed; the tree's own may have, too */
  choose(message) {
    const changed = [];
    for (let each = message; each; each = this.parent(each)) {
      const parent = this.parent(each);
      if (!parent) this.chosen = each.id;
      else if (parent.chosen !== each.id) {
        parent.chosen = each.id;
        changed.push(parent);
      }
    }
    return changed;
  }

  /** A message and all below it, but what was deleted; null: all. @returns {Message[]} */
  subtree(message) {
    const found = message ? [message] : this.children(null);
    for (const each of found) found.push(...this.children(each));
    return found;
  }

  /** Drafts: answers to one question that came side by side. @returns {Message[]} */
  drafts(question) {
    return question?.role === "user" ? this.children(question).filter(({ role }) => role === "assistant") : [];
  }

  #hang(message) {
    if (!this.below.has(message.parent)) this.below.set(message.parent, []);
    this.below.get(message.parent).push(message);
  }
}

/** What of a user's message goes to the model: its text behind the marks of its pictures, and the attached texts. */
export function contentOf({ text, files = [] }) {
  const pictures = picturesOf({ files });
  const parts = files.filter(({ picture }) => !picture).map(({ name, text: body }) => {
    const fence = "`".repeat(Math.max(3, longestRun(body) + 1));
    return `${name}:\n${fence}\n${body}\n${fence}`;
  });
  const said = [text, ...parts].filter(Boolean).join("\n\n");
  return pictures.length ? MARK.repeat(pictures.length) + said.replaceAll(MARK, "\ufffd") : said;
}

/** Where a picture stands in text. */
export const MARK = "\ufffc";

/** The pictures of a message, in base64. @returns {string[]} */
export const picturesOf = ({ files = [] }) => files.flatMap(({ picture }) => picture ?? []);

/** The messages of one node as the protocol's `append.messages` wants them. @param {Message} message */
export function asMessages(message) {
  const { role, system, calls, text } = message;
  if (role === "assistant") {
    const said = withoutThought(text);
    return [{ role, content: said, ...(calls?.length && { tool_calls: calls.map(plainCall) }) }];
  }
  if (role === "tool") return message.results.map(({ id, name, text: content }) => ({ role, content, ...(id && { tool_call_id: id }), name }));
  return [...(system ? [{ role: "system", content: system }] : []), { role, content: contentOf(message) }];
}

const plainCall = ({ id, name, arguments: args }) => ({ ...(id && { id }), type: "function", function: { name, arguments: args } });

/** An answer as its thought and the rest. @returns {{thought: string, open: boolean, rest: string}} `open`: it still thinks */
export function split(text) {
  const begin = /^\s*(<think>|\[THINK\])/.exec(text);
  const end = /<\/think>|\[\/THINK\]/.exec(text);
  if (!begin && !end) return { thought: "", open: false, rest: text };
  const from = begin ? begin[0].length : 0;
  if (!end) return { thought: text.slice(from), open: true, rest: "" };
  return { thought: text.slice(from, end.index).trim(), open: false, rest: text.slice(end.index + end[0].length).replace(/^\s+/, "") };
}

export const withoutThought = (text) => split(text).rest;

/** A short line for lists and the tree. */
export function brief(text, most = 80) {
  const line = withoutThought(text).replace(/[`*_#>|~]+/g, "").replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

function longestRun(text) {
  return Math.max(0, ...(text.match(/`+/g) ?? []).map(({ length }) => length));
}

/** 96 random bits; `crypto.randomUUID` is missing on pages without TLS. */
export function unique() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
