/** Markdown to sanitised DOM: markdown-it parses, DOMPurify lets through what is listed here. Raw HTML stays text. */

import { tasklist } from "@mdit/plugin-tasklist";
import { tex } from "@mdit/plugin-tex";
import DOMPurify from "dompurify";
import MarkdownIt from "markdown-it";
import { t } from "../strings.js";

const TAGS = [
  "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "s", "a",
  "table", "thead", "tbody", "tr", "th", "td", "input", "span", "div",
];
const ATTRIBUTES = ["href", "title", "class", "start", "align", "type", "checked", "disabled", "data-tex", "data-display"];
const SAFE = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true };

export const markdown = new MarkdownIt({ html: false, linkify: true, maxNesting: 40 })
  .use(tasklist, { disabled: true, label: false })
  .use(tex, { delimiters: "all", render: (content, display) => formula(content, display) });

markdown.validateLink = (url) => /^(https?:|mailto:|#)/i.test(url.trim());
markdown.renderer.rules.image = (tokens, i) => { // nothing is loaded from outside: a picture is a link to it
  const url = tokens[i].attrGet("src");
  const { escapeHtml } = markdown.utils;
  return `<a href="${escapeHtml(url)}">${escapeHtml(tokens[i].content || url)}</a>`;
};
markdown.renderer.rules.table_open = () => "<div class=\"table\"><table>";
markdown.renderer.rules.table_close = () => "</table></div>";
for (const cell of ["th_open", "td_open"]) { // a strict policy takes no style attributes
  markdown.renderer.rules[cell] = (tokens, i, options, _, self) => {
    const align = /text-align:(\w+)/.exec(tokens[i].attrGet("style") ?? "")?.[1];
    tokens[i].attrs = align ? [["align", align]] : null;
    return self.renderToken(tokens, i, options);
  };
}

function formula(content, display) {
  const { escapeHtml } = markdown.utils;
  const code = escapeHtml(content);
  const span = `<span class="math" data-display="${display ? "1" : ""}" data-tex="${code}"><code>${code}</code></span>`;
  return display ? `<p>${span}</p>` : span;
}

/** Top-level blocks of a text: their tokens, and where they begin and end (characters).
 *  @returns {{tokens: object[], begin: number, end: number}[]} */
export function blocks(text, env) {
  const lines = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) lines.push(at + 1);
  const place = (line) => lines[line] ?? text.length;
  const found = [];
  let group = [];
  for (const token of markdown.parse(text, env)) {
    group.push(token);
    if (token.level !== 0 || token.nesting > 0) continue;
    const { map } = group[0];
    found.push({ tokens: group, begin: map ? place(map[0]) : found.at(-1)?.end ?? 0, end: map ? place(map[1]) : text.length });
    group = [];
  }
  return found;
}

const LEAST_PIECE = 0.4; // of a text, that is in front of a cut
const TRIES = 6;

/**
 * Where a paragraph's beginning can be drawn for good: behind a space or a sentence, in front of a letter (which begins no
 * block of its own), and where no markup is open, if there is such a place. @returns {number} 0: nowhere
 */
export function cutOf(text, env) {
  const places = [];
  const pattern = /(?:[^\s\\][ \n]|[。！？，、])(?=\p{L})/gu;
  pattern.lastIndex = Math.floor(text.length * LEAST_PIECE);
  for (let found = pattern.exec(text); found; found = pattern.exec(text)) places.push(pattern.lastIndex);
  if (!places.length) return 0;
  const whole = markdown.renderInline(text, env);
  const step = Math.max(1, Math.floor(places.length / TRIES));
  for (let i = places.length - 1; i >= 0; i -= step) {
    if (whole.startsWith(markdown.renderInline(text.slice(0, places[i]).trimEnd(), env))) return places[i];
  }
  return places.at(-1);
}

/** @returns {DocumentFragment} */
export function fragment(tokens, env) {
  return sanitised(markdown.renderer.render(tokens, markdown.options, env));
}

/** @returns {DocumentFragment} */
export function sanitised(html) {
  const clean = DOMPurify.sanitize(html, SAFE);
  for (const link of clean.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const box of clean.querySelectorAll("input")) {
    box.type = "checkbox";
    box.disabled = true;
    box.ariaLabel = box.checked ? t.isDone : t.toDo;
  }
  for (const each of clean.querySelectorAll("p, li, h1, h2, h3, h4, h5, h6, blockquote, th, td")) each.dir = "auto";
  return clean;
}

/** Formulas as MathML; of KaTeX's output nothing but that is taken. @returns {DocumentFragment} */
export function mathml(html) {
  return DOMPurify.sanitize(html, { USE_PROFILES: { mathMl: true }, ADD_TAGS: ["semantics", "annotation"], FORBID_ATTR: ["style", "href"], RETURN_DOM_FRAGMENT: true });
}
