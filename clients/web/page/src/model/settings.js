/** What a person has set, kept in this browser: sampling, system prompt, tools, look, prefill. */

import { effect, signal } from "@preact/signals";
import { keepLanguage, language, languageOf, t } from "../strings.js";
import { server } from "./connection.js";
import { known, learn, offer } from "./mcp.js";

const KEPT = "ramify chat settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"];

/** The numbers of `generate` with their ranges; `label` and `hint` name strings. @type {{name: string, label: string, min: number, max: number, step: number, hint: string}[]} */
export const FIELDS = [
  { name: "temperature", label: "temperature", min: 0, max: 100, step: 0.1, hint: "temperatureHint" },
  { name: "max_tokens", label: "maxTokens", min: 1, max: 2147483647, step: 1, hint: "maxTokensHint" },
  { name: "top_p", label: "topP", min: 0.01, max: 1, step: 0.01, hint: "topPHint" },
  { name: "top_k", label: "topK", min: 0, max: 2147483647, step: 1, hint: "topKHint" },
  { name: "min_p", label: "minP", min: 0, max: 1, step: 0.01, hint: "minPHint" },
  { name: "seed", label: "seed", min: 0, max: 9007199254740991, step: 1, hint: "seedHint" },
  { name: "repetition_penalty", label: "repetitionPenalty", min: 0.01, max: 100, step: 0.05, hint: "noneIsOne" },
  { name: "presence_penalty", label: "presencePenalty", min: -2, max: 2, step: 0.1, hint: "noneIsZero" },
  { name: "frequency_penalty", label: "frequencyPenalty", min: -2, max: 2, step: 0.1, hint: "noneIsZero" },
];

/** What a chat keeps for itself, else it is as set for all chats. `count`, `format` and `effort` are a chat's own alone. */
const OWN = [...NUMBERS, "stop", "count", "format", "effort"];
const DEFAULTS = { system: "", tools: "", mcp: [], theme: "system", language: "system", folded: false, ahead: false, form: false, stop: "" };

function kept() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEPT)) };
  } catch {
    return { ...DEFAULTS }; // damaged, or no storage: as new
  }
}

export const settings = signal(kept());
keepLanguage(signal("en"));

export function set(changes) {
  settings.value = { ...settings.value, ...changes };
}

/** The settings as they hold in a chat. */
export function settingsOf(chat) {
  const { own = {} } = chat.record;
  return { ...settings.value, count: 1, format: "", effort: "", ...Object.fromEntries(OWN.filter((name) => own[name] !== undefined).map((name) => [name, own[name]])) };
}

effect(() => {
  try { localStorage.setItem(KEPT, JSON.stringify(settings.value)); } catch { /* they last as long as the page */ }
});
effect(() => {
  language.value = languageOf(settings.value.language);
  document.documentElement.lang = language.value;
});
effect(() => {
  const { theme } = settings.value;
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
});

/** Fields of `generate` as they are set in a chat; what is empty is the server's to choose. */
export function options(chat) {
  const all = settingsOf(chat);
  const found = {};
  for (const name of NUMBERS) if (all[name] !== undefined && all[name] !== "") found[name] = Number(all[name]);
  const stop = all.stop.split("\n").filter(Boolean);
  if (stop.length) found.stop = stop;
  const schema = schemaOf(all.format).schema;
  if (schema) found.constraint = { json_schema: schema };
  return { ...found, ...thought(all.effort, found.max_tokens) };
}

/** How much the served model can be asked to think, as /v1/info tells it. Without efforts: it does not think. */
export const thinking = () => server.value?.model?.thinking ?? { told: false, efforts: {} };

/** What holds where a number is left empty. @param {string} name @returns {number | undefined} */
export const usual = (name) => server.value?.model?.sampling?.[name];

/** An effort as a field of `generate`. What a chat template is told instead goes with `open`. */
function thought(effort, most = usual("max_tokens")) {
  const { told, efforts } = thinking();
  if (!efforts[effort] || (told && effort !== "none")) return {};
  const { tokens, part } = efforts[effort];
  return { thought_tokens: tokens && Math.max(1, Math.min(tokens, Math.floor(most * part))) };
}

/** A schema as it was typed. @returns {{schema?: object, error?: string}} */
export function schemaOf(text) {
  if (!text.trim()) return {};
  try {
    const schema = JSON.parse(text);
    if (schema === null || typeof schema !== "object" || Array.isArray(schema)) return { error: t.schemaIsObject };
    return { schema };
  } catch (error) {
    return { error: t.noJson(error.message) };
  }
}

/** Tools as they were typed. @returns {{tools?: object[], error?: string}} */
export function toolsOf(text) {
  if (!text.trim()) return { tools: [] };
  try {
    const tools = JSON.parse(text);
    if (!Array.isArray(tools)) return { error: t.toolsAreList };
    return { tools };
  } catch (error) {
    return { error: t.noJson(error.message) };
  }
}

/** The MCP servers that are switched on, of those that the server has. */
const servers = () => settings.value.mcp.filter((name) => server.value?.mcp?.includes(name));

effect(() => learn(servers()));

/** What a chat that starts now can call: typed tools, which a person answers, and those of MCP servers. */
export function offered() {
  const { tools, mcp } = offer(servers(), known.value);
  const names = new Set(tools.map(({ function: { name } }) => name));
  const typed = (toolsOf(settings.value.tools).tools ?? []).filter((each) => !names.has((each?.function ?? each)?.name));
  return { tools: [...typed, ...tools], mcp };
}
