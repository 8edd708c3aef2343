/** What a person has set, kept in this browser: sampling, system prompt, tools, look, prefill. */

import { effect, signal } from "@preact/signals";

const KEPT = "ramify chat settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"];

/** The numbers of `generate` with their ranges. @type {{name: string, label: string, min: number, max: number, step: number, hint: string}[]} */
export const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: 0.1, hint: "0 always takes the likeliest token" },
  { name: "max_tokens", label: "Most tokens", min: 1, max: 2147483647, step: 1, hint: "1024 if left empty" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, hint: "the likeliest tokens that make up this much" },
  { name: "top_k", label: "Top k", min: 0, max: 2147483647, step: 1, hint: "so many of the likeliest; 0: all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "at least this part of the best one's chance" },
  { name: "seed", label: "Seed", min: 0, max: 9007199254740991, step: 1, hint: "the same answer again; empty: random" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, step: 0.05, hint: "1: none" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: "0: none" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "0: none" },
];

const DEFAULTS = { system: "", tools: "", theme: "system", ahead: false, count: 1, format: "", form: false, stop: "" };

function kept() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEPT)) };
  } catch {
    return { ...DEFAULTS }; // damaged, or no storage: as new
  }
}

export const settings = signal(kept());

export function set(changes) {
  settings.value = { ...settings.value, ...changes };
}

effect(() => {
  try { localStorage.setItem(KEPT, JSON.stringify(settings.value)); } catch { /* they last as long as the page */ }
});
effect(() => {
  const { theme } = settings.value;
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
});

/** Fields of `generate` as they are set; what is empty is the server's to choose. */
export function options() {
  const all = settings.value;
  const found = {};
  for (const name of NUMBERS) if (all[name] !== undefined && all[name] !== "") found[name] = Number(all[name]);
  const stop = all.stop.split("\n").filter(Boolean);
  if (stop.length) found.stop = stop;
  const schema = schemaOf(all.format).schema;
  if (schema) found.constraint = { json_schema: schema };
  return found;
}

/** A schema as it was typed. @returns {{schema?: object, error?: string}} */
export function schemaOf(text) {
  if (!text.trim()) return {};
  try {
    const schema = JSON.parse(text);
    if (schema === null || typeof schema !== "object" || Array.isArray(schema)) return { error: "A schema is an object, as {\"type\": \"object\", ...}." };
    return { schema };
  } catch (error) {
    return { error: `This is no JSON: ${error.message}` };
  }
}

/** Tools as they were typed. @returns {{tools?: object[], error?: string}} */
export function toolsOf(text) {
  if (!text.trim()) return { tools: [] };
  try {
    const tools = JSON.parse(text);
    if (!Array.isArray(tools)) return { error: "Tools are a list: [{\"name\": ..., \"description\": ..., \"parameters\": {...}}]." };
    return { tools };
  } catch (error) {
    return { error: `This is no JSON: ${error.message}` };
  }
}
