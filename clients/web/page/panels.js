/**
 * What stands around the conversation: connection state, notices, settings, the token dialog, the
 * model's name, the drawer of narrow pages. Knows the page's elements; not sessions or branches.
 */

import { $ } from "./page.js";

const SETTINGS = "ramify chat settings";
const FIELDS = ["system", "temperature", "max-tokens", "seed"];
const WORDS = {
  open: "Connected", connecting: "Connecting", waiting: "Connection lost", offline: "No network",
  draining: "The server is restarting", closed: "Not connected",
};
let settings = {};
let clock = null;

/** Show the connection's state; a bar over the conversation where there is something to wait for. */
export function showStatus({ status, retryAt }) {
  clearInterval(clock);
  $("status").dataset.status = status;
  $("status-text").textContent = WORDS[status];
  if (status === "open" || status === "closed") $("bar").hidden = true;
  if (!["waiting", "offline", "draining"].includes(status)) return; // while connecting the bar stays as it was
  const count = () => {
    const seconds = Math.ceil((retryAt - Date.now()) / 1000);
    const again = status === "waiting" && seconds > 0 ? `; next try in ${seconds} s` : "";
    $("bar-text").textContent = `${WORDS[status]}${again}. Answers that run will be here when it is back.`;
  };
  count();
  if (status === "waiting") clock = setInterval(count, 500);
  $("bar").hidden = false;
}

/** A message above the composer. @param {[string, () => void]} [action] a button; `mild`: no error */
export function notice(text, { action, mild = false } = {}) {
  $("notice-text").textContent = text;
  $("notice").classList.toggle("mild", mild);
  $("notice").hidden = false;
  $("notice-action").hidden = !action;
  $("notice-action").textContent = action?.[0] ?? "";
  $("notice-action").onclick = () => { dismiss(); action[1](); };
}

export function dismiss() {
  $("notice").hidden = true;
}

/** Fields of `generate` as set, the server's default where nothing is. */
export function sampling() {
  const number = (name) => (settings[name] ? Number(settings[name]) : undefined);
  return { temperature: number("temperature"), max_tokens: number("max-tokens"), seed: number("seed") };
}

export function systemPrompt() {
  return settings.system?.trim() ?? "";
}

/** Ask for a token. Resolves to it, or to "" if the dialog was left. @returns {Promise<string>} */
export function askToken(message) {
  $("login-error").textContent = message;
  $("bearer").value = "";
  $("login").returnValue = "";
  $("login").showModal();
  return new Promise((resolve) => {
    $("login").addEventListener("close", () => {
      resolve($("login").returnValue ? $("bearer").value.trim() : "");
      $("bearer").value = "";
    }, { once: true });
  });
}

/** The model's name, and whether it is the small one that comes with Ramify. */
export async function showModel(bearer) {
  const headers = bearer ? { Authorization: `Bearer ${bearer}` } : {};
  const answer = await fetch("/v1/info", { headers }).catch(() => null);
  const { model } = answer?.ok ? await answer.json() : {};
  if (!model) return;
  const size = `${Math.round(model.parameters / 1e6)} M parameters`;
  const where = `${size}, ${model.device}, context ${model.context}`;
  const demo = model.model === "default_model";
  $("model").textContent = demo ? `Small demonstration model (${where})` : `${model.model} (${where})`;
  $("welcome-note").textContent = demo
    ? `You are talking to the small demonstration model that comes with Ramify (${size}). It chats, tells stories and does small sums; do not trust its facts. Start the server with --model to serve another.`
    : `${model.model}, ${where}`;
}

export function drawer(open) {
  document.body.classList.toggle("drawer", open);
  $("menu").setAttribute("aria-expanded", String(open));
  if (open) $("new-chat").focus();
}

/** Wire up the elements of this file; once. */
export function setUp() {
  try { settings = JSON.parse(localStorage.getItem(SETTINGS)) ?? {}; } catch { settings = {}; }
  $("open-settings").addEventListener("click", () => {
    for (const name of FIELDS) $(name).value = settings[name] ?? "";
    $("settings").showModal();
  });
  $("settings").addEventListener("close", () => {
    for (const name of FIELDS) if ($(name).validity.valid) settings[name] = $(name).value;
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  });
  $("notice-close").addEventListener("click", dismiss);
  $("menu").addEventListener("click", () => drawer(!document.body.classList.contains("drawer")));
  $("shade").addEventListener("click", () => drawer(false));
}
