/** Highlighting and formulas: libraries that are loaded when an answer first needs them. */

import { mathml, sanitised } from "./parser.js";

const MOST_CODE = 30_000; // characters that are highlighted; longer code stays plain
const MOST_TEX = 4_000;
const KATEX = { output: "mathml", throwOnError: true, trust: false, strict: "ignore", maxExpand: 200, maxSize: 20 };

let highlighter;
let formulas;

/** Colour a block of code once it is complete. @param {HTMLElement} code @param {string} language */
export async function highlight(code, language) {
  const text = code.textContent;
  if (!language || text.length > MOST_CODE) return;
  try {
    highlighter ??= import("highlight.js/lib/common");
    const { default: hljs } = await highlighter;
    if (!hljs.getLanguage(language)) return;
    code.replaceChildren(sanitised(hljs.highlight(text, { language, ignoreIllegals: true }).value));
  } catch {
    highlighter = undefined; // offline: plain code, and another try with the next block
  }
}

/** A formula as MathML without style attributes, which the page's policy forbids; null if it is none. */
function rendered(katex, tex, displayMode) {
  try {
    return katex.renderToString(tex, { ...KATEX, displayMode }).replace(/ style="[^"]*"/g, "");
  } catch {
    return null;
  }
}

/** Set the formulas in an element. */
export async function typeset(element) {
  const found = element.querySelectorAll("span.math[data-tex]");
  if (!found.length) return;
  try {
    formulas ??= import("katex");
    const { default: katex } = await formulas;
    for (const each of found) {
      const { tex, display } = each.dataset;
      delete each.dataset.tex;
      const drawn = tex.length > MOST_TEX ? null : rendered(katex, tex, display === "1");
      if (!drawn) continue; // it stays as it was written
      each.replaceChildren(mathml(drawn));
      each.classList.add("set");
    }
  } catch {
    formulas = undefined;
  }
}
