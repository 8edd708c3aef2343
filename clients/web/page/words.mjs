/**
 * What the build refuses: words for people outside of `src/strings.js`, strings that nothing shows or that a language lacks.
 *
 * Two looks at each source: the text between tags, and every string literal that reads like words - two of them, or one
 * that begins like a sentence. Names of classes, keys and headers are no words for people.
 */

import { readFile, readdir } from "node:fs/promises";
import { join } from "node:path";
import * as esbuild from "esbuild";

const TOLD_TO_THE_MODEL = ["game24/search.js"]; // its prompts; all else there is code
const BETWEEN_TAGS = /(?<!=)>\s*([^<>{}=;()&|]*[a-z]{2}[^<>{}=;()&|]*)[<{]/gi;
const REGEX = /(?<=[=(,:[!&|?]\s*|return\s)\/(?:[^/\\\n[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/[a-z]*/g;
const ATTRIBUTE = /\b(?:label|title|placeholder|alt|aria-(?:label|description|roledescription|valuetext))="([^"]*\p{L}{2}[^"]*)"/gu;
const LITERAL = /"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`/g;
const READS_LIKE_WORDS = /\p{L}{2,} \p{L}+|^\p{Lu}\p{Ll}+[ .:?!]?|\p{Ll}[.?!]$/u;
const NO_WORDS = [
  /^(Ramify|Accept|Authorization$|Bearer$|noopener |Escape|Enter|Esc|Tab|Home|End|Delete|Arrow(Up|Down|Left|Right)|Key[A-Z]|Digit\d|Comma|Slash|Backslash|Control|Files|Shift|Alt(\+\w)?)/,
  /^ramify( chat)?( \w+)?( \d)?$/, // keys of storage
  /^[a-z-]+\.(js|jsx|css|json|html|svg|png)$/, /^\.?\.?\//, // files
  /^(#|\.|\[|button|input|textarea|form|span|html)\S*([ ,>]+\S+)*$/, // selectors
];

/** What is wrong with the strings of the sources in `folder`. @param {string} folder @returns {Promise<string[]>} */
export async function wrongWords(folder) {
  const { LANGUAGES, WORDS } = await import(join(folder, "strings.js"));
  const found = [];
  const used = new Set();
  for (const file of (await readdir(folder, { recursive: true })).sort()) {
    if (!/\.jsx?$/.test(file) || file === "strings.js" || TOLD_TO_THE_MODEL.includes(file)) continue;
    const source = await readFile(join(folder, file), "utf8");
    const code = source.replace(/\/\*[\s\S]*?\*\/|^\s*\/\/.*$| \/\/ .*$/gm, "");
    for (const [, name, literal] of code.matchAll(/\b(?:t|english)\.(\w+)|"(\w+)"/g)) {
      used.add(name ?? literal);
      if (name && !WORDS[name]) found.push(`${file}: there is no string \`${name}\``);
    }
    const add = (words) => found.push(`${file}: outside of strings.js: ${JSON.stringify(words)}`);
    if (file.endsWith(".jsx")) for (const [, words] of code.matchAll(BETWEEN_TAGS)) if (!NO_WORDS.some((each) => each.test(words.trim()))) add(words.trim());
    for (const [, words] of code.matchAll(ATTRIBUTE)) add(words);
    const { code: plain } = await esbuild.transform(code.replace(/class=(?:"[^"]*"|\{`[^`]*`\})/g, ""), { loader: "jsx", jsx: "preserve" });
    for (const [, one, other] of plain.replace(REGEX, "").matchAll(LITERAL)) {
      const words = (one ?? other).replace(/\$\{[^}]*\}/g, "").trim();
      if (READS_LIKE_WORDS.test(words) && !NO_WORDS.some((each) => each.test(words))) add(words);
    }
  }
  for (const [name, each] of Object.entries(WORDS)) {
    if (!used.has(name)) found.push(`strings.js: nothing shows \`${name}\``);
    if (each.length !== Object.keys(LANGUAGES).length || each.some((one) => !one)) found.push(`strings.js: \`${name}\` is missing in a language`);
  }
  return found;
}
