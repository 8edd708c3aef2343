/**
 * Whether a value is valid under a JSON schema: a library says, in a worker.
 *
 * A pattern of a schema can take a browser's regular expressions for ever; then the worker is ended and the answer is "unknown".
 *
 * @typedef {{errors: {at: string, text: string}[]} | {unknown: string}} Verdict  `at`: a JSON pointer to the part that is wrong
 */

import { language, t } from "../strings.js";

const MOST_MS = 2_000;

let worker = null;
let asked = 0;
/** @type {Map<number, (verdict: Verdict) => void>} */
const waiting = new Map();

/** @returns {Promise<Verdict>} */
export function check(schema, value) {
  return new Promise((resolve) => {
    asked += 1;
    const id = asked;
    const timer = setTimeout(() => ended(t.checkTooLong), MOST_MS);
    waiting.set(id, (verdict) => { clearTimeout(timer); resolve(verdict); });
    try {
      worker ??= started();
      worker.postMessage({ id, schema, value, words: language.value });
    } catch (error) {
      ended(t.notChecked(error.message));
    }
  });
}

function started() {
  const made = new Worker(new URL("./validate.js", import.meta.url), { type: "module" });
  made.addEventListener("message", ({ data: { id, ...verdict } }) => {
    waiting.get(id)?.(verdict);
    waiting.delete(id);
  });
  made.addEventListener("error", () => ended(t.notChecked(t.checkerNotLoaded)));
  return made;
}

/** No answer will come. */
function ended(unknown) {
  worker?.terminate();
  worker = null;
  for (const tell of waiting.values()) tell({ unknown });
  waiting.clear();
}
