/**
 * The chat page: draws a `Conversation`, sends what the user does as ops of a `Session`.
 *
 * The server's tree is the truth. After a refresh the page asks for it and goes on with the generations
 * that still run. Model text reaches the DOM as text nodes only (see markdown.js).
 */

import { connect, mintToken } from "./ramify.js";
import { Conversation } from "./conversation.js";
import { Markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const NOTES = "ramify chat notes";
const SETTINGS = "ramify chat settings";
const EXAMPLES = ["Tell me a short story about a fox.", "What is 27 + 48?", "What can you do?"];

let session;
let current = "main";
let bearer = null;
let busyTree = null;
const conversation = new Conversation(read(sessionStorage, NOTES, undefined));
const settings = read(localStorage, SETTINGS, { system: "", temperature: "", maxTokens: "", seed: "" });
/** branch -> {generation, text: Markdown, node} of answers that are being written */
const live = new Map();

function read(storage, key, fallback) {
  try { return JSON.parse(storage.getItem(key)) ?? fallback; } catch { return fallback; }
}
function keepNotes() {
  sessionStorage.setItem(NOTES, JSON.stringify(conversation.notes));
}

/** @param {string} tag @param {object} fields properties; `class` and `on` are special */
function make(tag, { class: name, on = {}, ...fields } = {}, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  Object.assign(element, fields);
  for (const [event, action] of Object.entries(on)) element.addEventListener(event, action);
  element.append(...children.filter((child) => child !== null));
  return element;
}
const button = (label, action, name = "") => make("button", { type: "button", class: name, on: { click: action } }, label);

// --- connection ---------------------------------------------------------------------------------

function start() {
  const url = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/v1/ws`;
  session = connect({ url, token: bearer ? () => mintToken(location.origin, bearer) : undefined, open: { tick_ms: 30 } });
  session.addEventListener("status", ({ detail }) => showStatus(detail));
  session.addEventListener("state", attached);
  session.addEventListener("tree", () => refresh());
  session.addEventListener("lost", restore);
}

async function attached() {
  await refresh();
  for (const generation of session.running()) follow(generation);
}

/** Take the server's tree over and draw it. */
async function refresh() {
  busyTree ??= session.tree({ text: true }).finally(() => { busyTree = null; });
  try {
    conversation.load(await busyTree);
  } catch (error) {
    return fail(error);
  }
  if (!conversation.branches.has(current)) current = conversation.roots()[0]?.name ?? "main";
  draw();
}

/** The server restarted: build the same tree again, from text. */
function restore() {
  const ops = conversation.replay();
  live.clear();
  for (const { op, branch, as, turn } of ops) {
    if (op === "root") session.fork([as], { branch: null }).catch(fail);
    else if (op === "fork") session.fork([as], { branch }).catch(fail);
    else session.append(messagesOf(turn), { branch }).catch(fail);
  }
  notice("The server had restarted; the conversation was sent again.", null, true);
}

function messagesOf({ kind, text, system }) {
  const turn = { role: kind === "output" ? "assistant" : "user", content: text };
  return system ? [{ role: "system", content: system }, turn] : [turn];
}

function showStatus({ status, error }) {
  const words = { open: "Connected", connecting: "Connecting", waiting: "Connection lost, trying again", offline: "Offline", draining: "The server is stopping", closed: "Closed" };
  $("status").dataset.status = status;
  $("status-text").textContent = words[status] ?? status;
  if (status !== "closed" || !error) return;
  if (error.code === "unauthorized") return login(error.message);
  notice(error.message, ["New chat", () => newChat()]);
}

function login(message) {
  $("login-error").textContent = bearer ? message : "";
  $("login").showModal();
}

async function showModel() {
  try {
    const answer = await fetch("/v1/info", bearer ? { headers: { Authorization: `Bearer ${bearer}` } } : {});
    const { model } = await answer.json();
    const demo = model.model === "default_model";
    $("model").textContent = demo ? "Ramify's small demonstration model" : model.model;
    $("welcome-note").textContent = demo
      ? "This is the small demonstration model that comes with Ramify: it chats, tells stories and does small sums. Serve a model of your own with --model."
      : `${model.model}, ${(model.parameters / 1e6).toFixed(0)}M parameters, on ${model.device}`;
  } catch { $("model").textContent = ""; }
}

// --- what the user does ---------------------------------------------------------------------------

function options() {
  const number = (text) => (text === "" ? undefined : Number(text));
  return { temperature: number(settings.temperature), max_tokens: number(settings.maxTokens), seed: number(settings.seed) };
}

function send(text, branch = current) {
  const messages = [{ role: "user", content: text }];
  if (!conversation.branches.get(branch)?.turns.length && settings.system) {
    messages.unshift({ role: "system", content: settings.system });
  }
  const turn = conversation.append(branch, messages);
  session.append(messages, { branch }).then(
    (ok) => { conversation.appended(turn, messages, ok); keepNotes(); draw(); },
    (error) => { conversation.branches.get(branch)?.turns.splice(-1); fail(error); draw(); },
  );
  answer(branch, Number($("answers").value));
}

/** Generate on the branch, or `count` answers on children of it. */
function answer(branch, count = 1) {
  if (count > 1) {
    const names = conversation.names(count);
    const position = conversation.branches.get(branch).turns.at(-1)?.end;
    for (const generation of session.generate({ branch, n: count, as: names, ...options() })) {
      follow(generation, { parent: branch, at: position });
    }
  } else {
    follow(session.generate({ branch, ...options() }));
  }
  draw();
  toEnd();
}

/** Show a generation as it comes, then put it into the conversation. */
async function follow(generation, child = null) {
  const { branch } = generation;
  if (live.has(branch)) return;
  const text = make("div", { class: "text" });
  live.set(branch, { generation, child, text, markdown: new Markdown(text), started: performance.now() });
  draw();
  try {
    for await (const _ of generation) {
      const entry = live.get(branch);
      if (entry?.generation !== generation) return;
      const low = atEnd();
      entry.markdown.show(generation.text);
      if (low) toEnd();
    }
    const done = await generation.result;
    if (live.get(branch)?.generation === generation) live.delete(branch);
    if (done.reason === "error") fail(new Error(done.message ?? "the generation failed"));
    conversation.answered(branch, done);
    $("announce").textContent = done.text.slice(0, 400);
    keepNotes();
    await refresh();
  } catch (error) {
    if (live.get(branch)?.generation === generation) live.delete(branch);
    fail(error);
    draw();
  }
}

async function retry(turn) {
  const branch = current;
  try {
    await session.rollback({ branch, to: turn.start });
    conversation.rolledBack(branch, turn.start);
    answer(branch);
  } catch (error) { fail(error); }
}

async function edit(turn, text) {
  const branch = current;
  try {
    await session.rollback({ branch, to: turn.start });
    conversation.rolledBack(branch, turn.start);
    send(text, branch);
  } catch (error) { fail(error); }
}

async function branchFrom(turn) {
  const [name] = conversation.names(1);
  try {
    await session.fork([name], { branch: current, at: turn.end });
    conversation.forked(current, [name], turn.end);
    show(name);
    $("input").focus();
  } catch (error) { fail(error); }
}

async function drop(name) {
  const gone = [name];
  for (const each of gone) gone.push(...conversation.children(each).map((child) => child.name));
  live.forEach(({ generation }, branch) => { if (gone.includes(branch)) generation.cancel().catch(() => {}); });
  await session.drop(gone).catch(fail);
  if (gone.includes(current)) current = "main";
  await refresh();
}

async function newChat() {
  live.clear();
  await session.close();
  sessionStorage.removeItem(NOTES);
  conversation.notes = { messages: {}, bills: {} };
  conversation.branches = new Map([["main", { name: "main", at: 0, turns: [] }]]);
  current = "main";
  dismiss();
  start();
  draw();
  $("input").focus();
}

function stopAll() {
  for (const { generation } of live.values()) generation.cancel().catch(fail);
}

// --- drawing ----------------------------------------------------------------------------------------

function show(name) {
  current = name;
  drawer(false);
  draw();
  toEnd();
}

function draw() {
  const branch = conversation.branches.get(current);
  const turns = branch?.turns ?? [];
  const choices = conversation.answers(current);
  const writing = [...live.entries()].filter(([, { child }]) => child?.parent === current);
  const cards = [...choices.filter(({ name }) => !live.has(name)).map(card), ...writing.map(writingCard)];
  const nodes = turns.map((turn, i) => (turn.kind === "input" ? userTurn(turn) : answerTurn(turn, i === turns.length - 1)));
  if (live.has(current)) nodes.push(liveTurn(live.get(current)));
  if (cards.length) nodes.push(make("div", { class: "answers" }, ...cards));
  $("turns").replaceChildren(...nodes);
  $("turns").classList.toggle("compare", cards.length > 0);
  $("welcome").hidden = nodes.length > 0;
  $("title").textContent = (branch && conversation.label(branch)) || "New chat";
  $("stop").hidden = live.size === 0;
  $("send").hidden = live.has(current);
  drawTree();
}

function userTurn(turn) {
  const bubble = make("div", { class: "bubble" }, turn.text);
  const node = make("article", { class: "turn user", ariaLabel: "You" });
  const under = make("div", { class: "under" }, button("Edit", () => editor(node, turn)));
  node.append(...(turn.system ? [make("div", { class: "system" }, turn.system)] : []), bubble, under);
  return node;
}

function editor(node, turn) {
  const area = make("textarea", { value: turn.text, rows: 3, ariaLabel: "Edit your message" });
  const form = make("form", { on: { submit: (event) => { event.preventDefault(); edit(turn, area.value.trim()); } } },
    area,
    make("div", { class: "buttons" }, button("Cancel", draw), make("button", { class: "primary", type: "submit" }, "Send")));
  node.replaceChildren(form);
  area.focus();
}

function answerTurn(turn, last) {
  const text = make("div", { class: "text" });
  if (turn.text) new Markdown(text).show(turn.text);
  else text.append(make("p", { class: "empty" }, "No answer"));
  return make("article", { class: "turn", ariaLabel: "Answer" }, text,
    make("div", { class: "under" },
      make("span", { class: "stats" }, stats(turn)),
      button("Branch from here", () => branchFrom(turn)),
      last ? button("Retry", () => retry(turn)) : null));
}

function liveTurn({ text }) {
  return make("article", { class: "turn live", ariaLabel: "Answer", ariaBusy: "true" }, text, make("div", { class: "under" }));
}

function card({ name, turns }) {
  const turn = turns.at(-1);
  const text = make("div", { class: "text" });
  new Markdown(text).show(turn?.text ?? "");
  return make("section", { class: "card" }, make("h3", {}, name), text,
    make("div", { class: "under" }, make("span", { class: "stats" }, turn ? stats(turn) : ""), button("Continue with this", () => show(name), "choose")));
}

function writingCard([name, { text }]) {
  return make("section", { class: "card live" }, make("h3", {}, name), text, make("div", { class: "under" }));
}

/** Tokens, speed, time to the first token, cached tokens. */
function stats({ usage, reason }) {
  if (!usage) return "";
  const seconds = (usage.total_ms - (usage.ttft_ms ?? 0)) / 1000;
  const parts = [`${usage.output} tokens`];
  if (usage.output > 1 && seconds > 0) parts.push(`${((usage.output - 1) / seconds).toFixed(0)} tok/s`);
  if (usage.ttft_ms != null) parts.push(`first after ${usage.ttft_ms.toFixed(0)} ms`);
  parts.push(`${usage.cached ?? 0} of ${usage.prompt} cached`);
  if (reason && reason !== "stop") parts.push(reason);
  return parts.join(" · ");
}

function drawTree() {
  const item = (branch) => {
    const row = make("div", { class: branch.name === current ? "current" : "" },
      make("button", { type: "button", class: `pick${live.has(branch.name) ? " busy" : ""}`, title: branch.name, on: { click: () => show(branch.name) } },
        make("span", {}, conversation.label(branch) ?? (branch.name === "main" ? "New chat" : branch.name))),
      branch.name === "main" ? null : make("button", { type: "button", class: "icon drop", ariaLabel: `Delete ${branch.name}`, on: { click: () => drop(branch.name) } }, "×"));
    const children = conversation.children(branch.name);
    return make("li", {}, row, children.length ? make("ul", {}, ...children.map(item)) : null);
  };
  $("tree").replaceChildren(make("ul", {}, ...conversation.roots().map(item)));
}

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

function notice(text, action = null, mild = false) {
  $("notice").hidden = false;
  $("notice").classList.toggle("mild", mild);
  $("notice-text").textContent = text;
  $("notice-action").hidden = !action;
  if (action) {
    $("notice-action").textContent = action[0];
    $("notice-action").onclick = () => { dismiss(); action[1](); };
  }
}
function dismiss() {
  $("notice").hidden = true;
}
function fail(error) {
  if (error?.code !== "cancelled") notice(error?.message ?? String(error));
}

function drawer(open) {
  document.body.classList.toggle("drawer", open); // only narrow pages have one
  $("menu").setAttribute("aria-expanded", String(open));
}

// --- events -----------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || live.has(current)) return;
  $("input").value = "";
  grow();
  send(text);
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
function grow() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
}
$("input").addEventListener("input", grow);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && live.size && !document.querySelector("dialog[open]")) stopAll();
});
$("stop").addEventListener("click", stopAll);
$("new-chat").addEventListener("click", newChat);
$("menu").addEventListener("click", () => drawer(!document.body.classList.contains("drawer")));
$("shade").addEventListener("click", () => drawer(false));
$("notice-close").addEventListener("click", dismiss);
$("latest").addEventListener("click", toEnd);
$("log").addEventListener("scroll", () => { $("latest").hidden = atEnd(); });
$("open-settings").addEventListener("click", () => {
  $("system").value = settings.system;
  $("temperature").value = settings.temperature;
  $("max-tokens").value = settings.maxTokens;
  $("seed").value = settings.seed;
  $("settings").showModal();
});
$("settings").addEventListener("close", () => {
  Object.assign(settings, { system: $("system").value.trim(), temperature: $("temperature").value, maxTokens: $("max-tokens").value, seed: $("seed").value });
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
});
$("login").addEventListener("close", () => {
  bearer = $("bearer").value.trim();
  $("bearer").value = "";
  if (bearer) {
    start();
    showModel();
  }
});
for (const example of EXAMPLES) $("examples").append(button(example, () => send(example)));

conversation.branches.set("main", { name: "main", at: 0, turns: [] });
showModel();
start();
draw();
$("input").focus();
