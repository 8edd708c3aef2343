/**
 * An answer as it grows: what is complete stays as it is, only the last block is drawn again.
 *
 * The text is taken in windows. All blocks of a window but the last are settled: drawn once. Code between fences
 * is added as text while it comes, and a long paragraph is settled in pieces. What no answer of a sane model holds
 * (a word of a megabyte, a table of ten thousand rows) is drawn plainly, or in parts. Work is done in slices, so that
 * the page stays quick. What is drawn depends on the text alone, not on the pieces that it came in.
 */

import { blocks, cutOf, fragment } from "./parser.js";
import { t } from "../strings.js";
import { copied } from "./clipboard.js";
import { highlight, typeset } from "./extras.js";

const WINDOW = 4_096; // characters that are parsed at once
const MOST_WINDOW = 32_768; // a block that is longer is not parsed
const MOST_LINE = 8_192; // of a line that is parsed
const PLAIN = 16_384; // characters of plain text in one element
const PIECE = 2_048; // characters of a paragraph that are looked at to settle its beginning
const MOST_PARAGRAPH = 8_192; // a longer one is drawn as several, one below the other: so much is laid out again with each change
const ROWS = 200; // of a table that are shown at first, and more with each click
const SLICE_MS = 6;
const TURN_MS = 12; // after that, answers that are told of more text are in another turn of the page
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`\n]*)\n/;

/** Elements with work left; they take turns. @type {Set<Answer>} */
const busy = new Set();
let next = null;

let turn = -Infinity; // when the present turn began

/** Whether an answer may be drawn at once: several that grow in the same turn share its slice. */
function atOnce() {
  const now = performance.now();
  if (now - turn > TURN_MS) turn = now;
  return now - turn < SLICE_MS;
}

function later() {
  next ??= setTimeout(work, 0);
}

function work() {
  next = null;
  const until = performance.now() + SLICE_MS;
  for (const each of busy) {
    busy.delete(each);
    if (each.step()) busy.add(each); // to the end of the line
    else each.idle();
    if (performance.now() > until) break;
  }
  if (busy.size) later();
}

export class Answer {
  #element;
  #text = "";
  #final = false;
  #settled = 0; // characters that are drawn for good
  #window = WINDOW;
  #env = {};
  #paragraph = null; // one whose beginning is settled: its element, and how many characters that is
  #tail = []; // nodes of the last block
  #drawn = ""; // the text that the tail shows
  #fence = null;
  #table = null;
  #cost = 0;
  #again = 0; // not before this time is the last block drawn again

  /** @param {HTMLElement} element  which this object fills */
  constructor(element) {
    this.#element = element;
  }

  /** Show a text; mostly it begins with the one before. `final`: no more will come. */
  show(text, final = false) {
    if (text === this.#text && final === this.#final) return;
    const kept = Math.min(this.#settled + (this.#fence?.shown ?? 0), this.#text.length);
    if (!text.startsWith(this.#text.slice(0, kept))) this.#restart();
    this.#text = text;
    this.#final = final;
    if (!atOnce() || this.step()) {
      busy.add(this);
      later();
    }
  }

  /** Resolves when all of the text is drawn. */
  get done() {
    return busy.has(this) ? new Promise((resolve) => { this.#waiting.push(resolve); }) : Promise.resolve();
  }

  #waiting = [];

  /** Nothing is left to do. */
  idle() {
    for (const resolve of this.#waiting.splice(0)) resolve();
  }

  /** Do one piece of work. @returns {boolean} whether there is more */
  step() {
    const began = performance.now();
    if (!this.#final && began < this.#again) return true;
    const more = this.#fence ? this.#code() : this.#table ? this.#rows() : this.#blocks();
    this.#cost = performance.now() - began;
    this.#again = began + 4 * this.#cost; // at most a quarter of the time goes into one answer
    return more;
  }

  #restart() {
    this.#element.replaceChildren();
    this.#settled = 0;
    this.#tail = [];
    this.#drawn = "";
    this.#fence = this.#table = this.#paragraph = null;
    this.#env = {};
  }

  // --- blocks --------------------------------------------------------------------------------------

  #blocks() {
    const blank = /^(?:[ \t]*\n)+/.exec(this.#text.slice(this.#settled, this.#settled + WINDOW));
    if (blank && !this.#tail.length) this.#settled += blank[0].length;
    if (blank) this.#paragraph = null;
    const end = Math.min(this.#text.length, this.#settled + this.#window);
    const tail = this.#text.slice(this.#settled, end);
    const whole = end === this.#text.length;
    if (whole && tail === this.#drawn && !this.#final) return false;
    if (tail === "") return this.#clear(); // all is settled
    const fence = FENCE.exec(tail);
    if (fence) return this.#openFence(fence);
    const long = longLine(tail);
    if (long === 0) return this.#plain();
    const text = long > 0 ? tail.slice(0, long) : tail;
    const found = blocks(text, this.#env);
    const paragraph = found.findIndex(({ tokens, begin, end: to }) => tokens[0].type === "paragraph_open" && to - begin >= PIECE);
    if (paragraph > 0) return this.#settle(tail.slice(0, found[paragraph].begin), found, paragraph);
    const cut = paragraph === 0 ? cutOf(tail.slice(0, PIECE), this.#env) : 0;
    if (cut > 0) return this.#piece(tail.slice(0, cut));
    if (long > 0 || (whole && this.#final)) return this.#settle(text, found, found.length) || long > 0;
    const at = found.findIndex(({ tokens }, i) => i > 0 && tokens[0].type === "fence");
    if (at > 0) return this.#settle(tail.slice(0, found[at].begin), found.slice(0, at), at);
    if (found.length > 1) {
      this.#settle(tail.slice(0, found.at(-1).begin), found, found.length - 1);
      if (!whole) return true;
      return this.#last(this.#text.slice(this.#settled), found.at(-1));
    }
    if (whole) return this.#last(tail, found[0]);
    if (this.#window < MOST_WINDOW) {
      this.#window *= 2;
      return true;
    }
    if (found[0]?.tokens[0].type === "table_open") return this.#openTable(tail);
    return this.#plain();
  }

  /** Draw blocks for good. @returns {boolean} whether text is left */
  #settle(text, found, count) {
    this.#clear();
    for (const { tokens } of found.slice(0, count)) {
      this.#put(this.#nodes(tokens, true));
      this.#paragraph = null;
    }
    this.#settled += text.length;
    this.#window = WINDOW;
    return this.#settled < this.#text.length;
  }

  /** Draw the beginning of a paragraph for good. */
  #piece(text) {
    this.#clear();
    const [{ tokens }] = blocks(text, this.#env);
    const nodes = this.#nodes(tokens, true);
    const paragraph = this.#paragraph?.element ?? nodes[0];
    const length = (this.#paragraph?.length ?? 0) + text.length;
    this.#put(nodes);
    const space = /\s$/.exec(text);
    if (space) paragraph.append(space[0]);
    this.#paragraph = { element: paragraph, length };
    if (length >= MOST_PARAGRAPH) {
      paragraph.classList.add("goes-on");
      this.#paragraph = null;
    }
    this.#settled += text.length;
    this.#window = WINDOW;
    return true;
  }

  /** Add what blocks were drawn as: to the paragraph that has begun, or as elements of their own. @returns {Node[]} what was added */
  #put(nodes) {
    const inner = this.#paragraph ? [...nodes[0].childNodes] : nodes;
    (this.#paragraph?.element ?? this.#element).append(...inner);
    return inner;
  }

  /** Draw the block that still grows. */
  #last(text, block) {
    this.#clear();
    this.#tail = block ? this.#put(this.#nodes(block.tokens, false)) : [];
    this.#drawn = text;
    return false;
  }

  #clear() {
    for (const node of this.#tail) node.remove();
    this.#tail = [];
    this.#drawn = "";
    return false;
  }

  #nodes(tokens, complete) {
    const drawn = fragment(tokens, this.#env);
    for (const pre of drawn.querySelectorAll("pre")) {
      const code = pre.firstElementChild ?? pre;
      const language = /language-([\w+#-]+)/.exec(code.className)?.[1] ?? "";
      const box = codeBox(language);
      pre.replaceWith(box.element);
      box.code.append(code.textContent.replace(/\n$/, ""));
      if (complete) highlight(box.code, language);
    }
    const nodes = [...drawn.children];
    if (complete) for (const node of nodes) typeset(node);
    return nodes;
  }

  /** Text that is not parsed. */
  #plain() {
    this.#clear();
    this.#paragraph = null;
    const element = document.createElement("div");
    element.className = "plain";
    element.dir = "auto";
    const line = this.#text.indexOf("\n", this.#settled);
    const end = Math.min(this.#text.length, this.#settled + PLAIN, line < 0 ? Infinity : line + 1);
    element.append(this.#text.slice(this.#settled, end));
    if (end === this.#text.length && !this.#final) {
      this.#tail = [element];
      this.#drawn = this.#text.slice(this.#settled);
      this.#element.append(element);
      return false;
    }
    this.#element.append(element);
    this.#settled = end;
    return this.#settled < this.#text.length;
  }

  // --- code ------------------------------------------------------------------------------------------

  #openFence([opening, indent, mark, info]) {
    this.#clear();
    const language = /^\s*([\w+#.-]+)/.exec(info)?.[1] ?? "";
    const box = codeBox(language);
    const node = document.createTextNode("");
    box.code.append(node);
    this.#element.append(box.element);
    this.#settled += opening.length;
    const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
    this.#fence = { ...box, language, node, end, indent: indent.length, shown: 0 };
    return true;
  }

  /** Add what has come to the open block of code. */
  #code() {
    const fence = this.#fence;
    const from = this.#settled + fence.shown;
    let at = from;
    const until = Math.min(this.#text.length, from + MOST_WINDOW);
    const lines = [];
    while (at < until) {
      const line = this.#text.indexOf("\n", at);
      const complete = line >= 0;
      const body = this.#text.slice(at, complete ? line : until);
      if (fence.end.test(body) && (complete || this.#final)) {
        fence.node.appendData(lines.join(""));
        return this.#closeFence((complete ? line + 1 : until));
      }
      if (!complete && !this.#final && /^ {0,3}[`~]*$/.test(body)) break; // may become the end
      if (!complete && line < 0 && until < this.#text.length && body.length < MOST_WINDOW) break;
      const started = at > 0 && this.#text[at - 1] === "\n";
      lines.push(started && fence.indent ? body.replace(new RegExp(`^ {0,${fence.indent}}`), "") : body, complete ? "\n" : "");
      at = complete ? line + 1 : until;
    }
    fence.node.appendData(lines.join(""));
    fence.shown += at - from;
    if (this.#final && at === this.#text.length) return this.#closeFence(at);
    return at > from && at < this.#text.length;
  }

  #closeFence(end) {
    const { node, code, language } = this.#fence;
    node.data = node.data.replace(/\n$/, "");
    highlight(code, language);
    this.#fence = null;
    this.#settled = end;
    return this.#settled < this.#text.length;
  }

  // --- tables that are longer than a window --------------------------------------------------------------

  #openTable(tail) {
    this.#clear();
    const head = tail.split("\n", 2).join("\n");
    const first = tail.slice(0, tail.lastIndexOf("\n", lines(tail, ROWS)) + 1);
    const [{ tokens }] = blocks(first, this.#env);
    const nodes = this.#nodes(tokens, true);
    this.#element.append(...nodes);
    this.#settled += first.length;
    const more = document.createElement("button");
    more.type = "button";
    more.className = "more";
    const table = { head, body: nodes[0].querySelector("tbody"), hidden: [], more };
    more.addEventListener("click", () => this.#showRows(table));
    this.#table = table;
    return true;
  }

  /** Lines that belong to the table are counted, and drawn when asked for. */
  #rows() {
    const table = this.#table;
    const until = Math.min(this.#text.length, this.#settled + MOST_WINDOW);
    let at = this.#settled;
    while (at < until) {
      const line = this.#text.indexOf("\n", at);
      if (line < 0 && !this.#final) break;
      const end = line < 0 ? this.#text.length : line;
      const row = this.#text.slice(at, end);
      if (!row.includes("|")) {
        this.#settled = at;
        this.#table = null;
        return true;
      }
      table.hidden.push(row.slice(0, MOST_LINE));
      at = Math.min(end + 1, this.#text.length);
    }
    this.#settled = at;
    this.#tellRows(table);
    return at < this.#text.length && at >= until;
  }

  #tellRows({ hidden, more, body }) {
    more.textContent = t.moreRows(hidden.length);
    if (!hidden.length) more.remove();
    else if (!more.isConnected) body.closest(".table").after(more);
  }

  #showRows(table) {
    const [block] = blocks(`${table.head}\n${table.hidden.splice(0, ROWS).join("\n")}\n`, {});
    const [drawn] = this.#nodes(block.tokens, true);
    table.body.append(...drawn.querySelectorAll("tbody > tr"));
    this.#tellRows(table);
  }
}

/** A block of code with its language and a button that copies it. */
function codeBox(language) {
  const element = document.createElement("div");
  element.className = "code";
  const head = document.createElement("div");
  head.className = "code-head";
  const label = document.createElement("span");
  label.textContent = language;
  const copy = document.createElement("button");
  copy.type = "button";
  copy.textContent = t.copy;
  copy.ariaLabel = language ? t.copyLanguage(language) : t.copyCode;
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  pre.dir = "ltr";
  const code = document.createElement("code");
  pre.append(code);
  head.append(label, copy);
  element.append(head, pre);
  copy.addEventListener("click", async () => {
    const done = await copied(code.textContent);
    copy.textContent = done ? t.copied : t.selectToCopy;
    setTimeout(() => { copy.textContent = t.copy; }, 1500);
  });
  return { element, code };
}

/** Where the first line begins that is too long to be parsed; -1 if there is none. */
function longLine(text) {
  for (let at = 0; at < text.length;) {
    const end = text.indexOf("\n", at);
    if ((end < 0 ? text.length : end) - at > MOST_LINE) return at;
    if (end < 0) break;
    at = end + 1;
  }
  return -1;
}

/** Where line number `count` ends. */
function lines(text, count) {
  let at = 0;
  for (let i = 0; i < count + 2; i += 1) {
    const end = text.indexOf("\n", at);
    if (end < 0) return text.length;
    at = end + 1;
  }
  return at;
}
