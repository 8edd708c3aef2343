/**
 * A small Markdown for model text: paragraphs, headings, lists, quotes, fenced code; bold, italic, code.
 *
 * Builds DOM nodes and sets text with `textContent`, never `innerHTML`: whatever a model writes is
 * shown, not run. Links and images stay plain text on purpose.
 *
 * @typedef {{kind: string, source: string, lines: string[], info?: string}} Block
 */

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const INLINE = /(`+)([^`](?:.*?[^`])?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=\S)([^*\n]+?)\*(?![\w*])/g;

/** Cut text into blocks. An unfinished one (a fence that is still open) counts as it is.
 *  @param {string} text @returns {Block[]} */
export function parse(text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let i = 0; i < lines.length;) {
    const first = i;
    const { kind, next, content, info } = block(lines, i);
    i = next;
    if (kind !== "blank") blocks.push({ kind, lines: content, info, source: lines.slice(first, next).join("\n") });
  }
  return blocks;
}

function block(lines, i) {
  const line = lines[i];
  if (!line.trim()) return { kind: "blank", next: i + 1, content: [] };
  const fence = FENCE.exec(line);
  if (fence) {
    let end = i + 1;
    while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
    return { kind: "code", info: fence[2], content: lines.slice(i + 1, end), next: end + 1 };
  }
  if (RULE.test(line)) return { kind: "rule", content: [], next: i + 1 };
  if (HEADING.test(line)) return { kind: "heading", content: [line], next: i + 1 };
  const [kind, goesOn] = ITEM.test(line)
    ? ["list", (text) => ITEM.test(text) || /^\s+\S/.test(text)]
    : line.startsWith(">")
      ? ["quote", (text) => text.startsWith(">")]
      : ["paragraph", (text) => text.trim() && ![FENCE, HEADING, RULE, ITEM].some((start) => start.test(text))];
  let end = i + 1;
  while (end < lines.length && goesOn(lines[end])) end += 1;
  return { kind, content: lines.slice(i, end), next: end };
}

/** Shows growing text in `root`; blocks that did not change keep their nodes (and the selection). */
export class Markdown {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    /** @type {string[]} */ this.sources = [];
  }

  /** @param {string} text */
  show(text) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && this.sources[same] === blocks[same].source) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    for (const each of blocks.slice(same)) this.root.append(render(each));
    this.sources = blocks.map((each) => each.source);
  }
}

function render({ kind, lines, info }) {
  switch (kind) {
    case "code": return code(lines.join("\n"), info);
    case "rule": return document.createElement("hr");
    case "heading": {
      const [, marks, text] = HEADING.exec(lines[0]);
      return inline(`h${Math.min(6, marks.length + 2)}`, text); // the page has h1 and h2
    }
    case "list": return list(lines);
    case "quote": return inline("blockquote", lines.map((line) => line.replace(/^> ?/, "")).join("\n"));
    default: return inline("p", lines.join("\n"));
  }
}

function code(text, info) {
  const pre = document.createElement("pre");
  const inner = pre.appendChild(document.createElement("code"));
  inner.textContent = text;
  pre.tabIndex = 0; // so that the keyboard can scroll it
  if (info) pre.dataset.language = info;
  return pre;
}

/** Items by indentation: deeper ones become a list inside the item above. */
function list(lines) {
  const root = { indent: -1, element: null, last: document.createDocumentFragment() };
  const open = [root];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (!match) {
      open.at(-1).last.append("\n", line.trim());
      continue;
    }
    const [, space, mark, text] = match;
    while (open.at(-1).indent > space.length) open.pop();
    if (open.at(-1).indent < space.length) {
      const element = document.createElement(/\d/.test(mark) ? "ol" : "ul");
      if (/\d/.test(mark)) element.start = parseInt(mark, 10);
      open.at(-1).last.append(element);
      open.push({ indent: space.length, element, last: null });
    }
    open.at(-1).last = open.at(-1).element.appendChild(inline("li", text));
  }
  return root.last.firstChild;
}

/** An element of text with bold, italic and code in it. */
function inline(tag, text) {
  const element = document.createElement(tag);
  fill(element, text);
  return element;
}

function fill(element, text) {
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    element.append(text.slice(at, match.index));
    const [whole, , source, bold, italic] = match;
    if (source !== undefined) element.appendChild(document.createElement("code")).textContent = source;
    else fill(element.appendChild(document.createElement(bold !== undefined ? "strong" : "em")), bold ?? italic);
    at = match.index + whole.length;
  }
  element.append(text.slice(at));
}
