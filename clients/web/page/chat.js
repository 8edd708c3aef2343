/**
 * The chat page: draws a `Conversation`, and sends what the user does as ops of a `Session`.
 *
 * The server's tree is the truth. After a refresh the page asks for it and goes on with the generations
 * that still run; where the server has forgotten the session, the page builds the same tree again.
 */

import { Conversation } from "./conversation.js";
import { $ } from "./page.js";
import { askToken, dismiss, drawer, notice, sampling, setUp, showModel, showStatus, systemPrompt } from "./panels.js";
import { connect, mintToken } from "/ramify/index.js";
import { LiveAnswer, answerTurn, arrange, button, card, divider, make, tree, userTurn } from "./view.js";

const KEPT = "ramify chat";
const CHUNK = 200; // ops in a frame and in a second: below the server's limits
const EXAMPLES = ["Tell me a short story about a fox.", "What is 27 + 48?", "What can you do?"];

let session;
let { conversation, current, bearer } = restored();
/** @type {Map<string, LiveAnswer>} branch -> the answer that is being written */
const live = new Map();
const nodes = new WeakMap(); // turn -> its node
let seen = 0; // where it was scrolled to last
let following = true; // the view stays at the end of the conversation

// --- kept over a refresh ---------------------------------------------------------------------------

function restored() {
  let kept = null;
  try { kept = JSON.parse(sessionStorage.getItem(KEPT)); } catch { /* damaged: start fresh */ }
  return { conversation: new Conversation(kept?.conversation), current: kept?.current ?? "main", bearer: kept?.bearer ?? "" };
}

function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify({ conversation: conversation.snapshot(), current, bearer }));
  } catch { /* storage is full: only a server restart together with a refresh would need it */ }
}

// --- connection --------------------------------------------------------------------------------------

function start() {
  session = connect(location.origin, {
    token: bearer ? token : undefined,
    storage: sessionStorage,
    retry: "always",
    renew: true,
    open: { tick_ms: 30 },
  });
  const mine = session;
  const on = (name, action) => session.addEventListener(name, ({ detail }) => { if (session === mine) action(detail); });
  on("status", showStatus);
  on("status", ({ status, error }) => { if (status === "closed") ended(error); });
  on("state", attached);
  on("tree", refresh);
  on("lost", forgotten);
}

/** Single-use, so that the long-lived token stays out of URLs and frames. */
async function token() {
  try {
    return await mintToken(location.origin, bearer);
  } catch (error) {
    if (error.code === "unsupported") return undefined; // the server has no tokens
    throw error;
  }
}

async function attached() {
  showModel(bearer);
  await refresh();
  for (const generation of session.running()) follow(generation);
}

/** Take over the server's tree and draw it. */
async function refresh() {
  const asked = session;
  const state = await asked.tree({ text: true }).catch(fail);
  if (!state || session !== asked) return;
  conversation.load(state);
  if (!conversation.branches.has(current)) current = conversation.roots()[0]?.name;
  keep();
  draw();
}

/** The session is gone (the server restarted, or it expired): build the same tree in the new one. */
async function forgotten() {
  for (const [branch, { generation }] of live) {
    const { id, text } = generation;
    if (text) conversation.answered(branch, { id, position: conversation.end(branch), reason: "interrupted", text });
  }
  live.clear();
  const ops = conversation.replay();
  if (!ops.length) return;
  const spare = conversation.branches.has("main") ? null : "main"; // a new session has it
  notice("The server no longer had this conversation; it was sent again from this page.", { mild: true });
  for (let i = 0; i < ops.length; i += CHUNK) {
    if (i) await new Promise((resolve) => { setTimeout(resolve, 1000); });
    ops.slice(i, i + CHUNK).forEach(again);
  }
  if (spare) session.drop(spare).catch(fail);
  if (spare || ops.length > CHUNK) refresh();
}

/** One op of `Conversation.replay`. */
function again({ op, branch, as, turn }) {
  if (op !== "append") return session.fork([as], { branch: op === "root" ? null : branch }).catch(fail);
  const messages = [{ role: turn.role, content: turn.text }];
  if (turn.system) messages.unshift({ role: "system", content: turn.system });
  return session.append(messages, { branch }).then((ok) => conversation.appended(turn, messages, ok), fail);
}

async function ended(error) {
  if (error.code === "unauthorized") {
    const given = await askToken(bearer ? error.message : "");
    if (!given) return notice("This server needs a token.", { action: ["Enter it", () => ended(error)] });
    bearer = given;
    keep();
    start();
  } else if (error.code === "replaced") {
    notice("This chat is open in another tab.", { action: ["Use it here", start], mild: true });
  } else if (error.code !== "closed") {
    notice(`${error.message}.`, { action: ["New chat", newChat] });
  }
}

// --- what the user does --------------------------------------------------------------------------------

/** Append the user's message and generate: one frame, no round trip in between. */
function send(text, branch = current) {
  if (session.status === "closed") {
    $("input").value = text;
    return notice("Not connected.", { action: ["New chat", newChat] });
  }
  const messages = [{ role: "user", content: text }];
  if (!conversation.branches.get(branch).turns.length && systemPrompt()) {
    messages.unshift({ role: "system", content: systemPrompt() });
  }
  const turn = conversation.append(branch, messages);
  const appended = session.append(messages, { branch });
  const known = answer(branch, appended.then(({ position }) => position));
  return appended.then((ok) => {
    conversation.appended(turn, messages, ok);
    known();
  }, (error) => {
    conversation.refused(branch, turn);
    if (!$("input").value) $("input").value = text;
    fail(error);
    draw();
  });
}

/** Generate on the branch, or as many answers as chosen on children of it. Returns what to call once the
 *  branch's position is known, which names the children's place in the tree. */
function answer(branch, position) {
  const count = Number($("answers").value);
  following = true;
  if (count === 1) {
    follow(session.generate({ branch, ...sampling() }));
    return async () => {
      live.get(branch)?.startsAt(await position);
      keep();
      draw();
    };
  }
  const as = conversation.names(count);
  const generations = session.generate({ branch, n: count, as, ...sampling() });
  for (const generation of generations) follow(generation);
  return async () => {
    const at = await position;
    conversation.forked(branch, as, at);
    for (const name of as) live.get(name)?.startsAt(at);
    keep();
    draw();
  };
}

/** Show a generation as it comes, then make it a turn. */
async function follow(generation) {
  const { branch } = generation;
  const mine = () => live.get(branch)?.generation === generation;
  if (mine()) return;
  const entry = new LiveAnswer(generation);
  live.set(branch, entry);
  draw();
  try {
    for await (const { position } of generation) {
      if (!mine()) return; // a new chat, or the session was lost
      entry.show(generation.text, position);
      if (following) toEnd();
    }
    const done = await generation.result;
    if (!mine()) return;
    live.delete(branch);
    conversation.answered(branch, done);
    $("announce").textContent = done.text;
  } catch (error) {
    if (!mine()) return;
    live.delete(branch);
    if (error.done) conversation.answered(branch, error.done); // it failed on its way: what there is stays
    else if (error.code !== "skipped") fail(error); // else the append has said why
  }
  keep();
  draw();
}

/** Back to `turn.start`, then `next`. */
async function back(turn, next) {
  const branch = current;
  const to = turn.start;
  try {
    const rolled = session.rollback({ branch, to });
    conversation.rolledBack(branch, to);
    next(branch);
    await rolled;
  } catch (error) {
    fail(error);
    refresh();
  }
}

const retry = (turn) => back(turn, (branch) => answer(branch, turn.start)());

function edit(turn, text, apart) {
  if (!apart) return back(turn, (branch) => send(text, branch));
  const name = fork(turn.start);
  return send(text, name);
}

/** A new branch at `at` of the one shown, which is then shown. @returns {string} its name */
function fork(at) {
  const [name] = conversation.names(1);
  session.fork([name], { branch: current, at }).catch((error) => { fail(error); refresh(); });
  conversation.forked(current, [name], at);
  show(name);
  return name;
}

async function drop(name) {
  const gone = [name];
  for (const each of gone) gone.push(...conversation.children(each).map((child) => child.name));
  if (gone.length === conversation.branches.size) return newChat();
  if (gone.length > 1 && !confirm(`Delete this branch and the ${gone.length - 1} that left it?`)) return;
  const running = gone.filter((each) => live.has(each));
  if (running.length) session.cancel({ branch: running }).catch(fail);
  const parent = conversation.branches.get(name).parent;
  await session.drop(gone).catch(fail);
  if (gone.includes(current)) current = parent ?? "main";
  await refresh();
}

async function newChat() {
  const old = session;
  live.clear();
  conversation = new Conversation();
  current = "main";
  dismiss();
  keep();
  await old.close();
  start();
  show("main");
  $("input").focus();
}

/** Branches that are written to in what is shown. */
function writing() {
  return [current, ...conversation.answers(current).map(({ name }) => name)].filter((name) => live.has(name));
}

function stop() {
  if (writing().length) session.cancel({ branch: writing() }).catch(fail);
}

function fail(error) {
  if (!["cancelled", "closed", "no_session"].includes(error.code)) notice(error.message);
}

// --- drawing ---------------------------------------------------------------------------------------------

function show(name) {
  current = name;
  following = true;
  drawer(false);
  keep();
  draw();
}

function draw() {
  const branch = conversation.branches.get(current);
  const choices = conversation.answers(current);
  const shown = branch.turns.map(nodeOf);
  if (branch.parent) {
    const inherited = branch.turns.length - conversation.own(branch).length;
    shown.splice(inherited, 0, origin(branch));
  }
  if (live.has(current)) shown.push(live.get(current).asTurn());
  if (choices.length) shown.push(make("div", { class: "answers" }, ...choices.map(choice)));
  arrange($("turns"), shown);
  shown.forEach((node, i) => node.classList.toggle("last", i === shown.length - 1));
  $("turns").classList.toggle("compare", choices.length > 0);
  $("welcome").hidden = branch.turns.length > 0;
  $("title").textContent = conversation.label(branch);
  $("stop").hidden = !writing().length;
  $("send").hidden = writing().length > 0;
  $("send").disabled = $("input").disabled = choices.length > 0;
  $("hint").hidden = choices.length > 0;
  $("input").placeholder = choices.length ? "Choose an answer to go on with" : "Send a message";
  $("tree").replaceChildren(tree(conversation, { current, busy: (name) => live.has(name), pick: show, drop }));
  if (following) toEnd();
}

function nodeOf(turn) {
  if (!nodes.has(turn)) {
    nodes.set(turn, turn.kind === "input"
      ? userTurn(turn, { edit: (text, apart) => edit(turn, text, apart) })
      : answerTurn(turn, {
        retry: () => retry(turn),
        goOn: () => follow(session.generate({ branch: current, ...sampling() })),
        branch: () => { fork(turn.end); $("input").focus(); },
      }));
  }
  return nodes.get(turn);
}

function choice({ name }, i) {
  const title = `Answer ${i + 1}`;
  if (live.has(name)) return live.get(name).asCard(title);
  const turn = conversation.own(conversation.branches.get(name)).find(({ kind }) => kind === "output");
  return card({ title, turn, choose: () => { show(name); $("input").focus(); } });
}

/** Where the branch shown comes from, with the way back. */
function origin({ parent }) {
  const others = conversation.answers(parent).length;
  const from = conversation.branches.get(parent);
  const label = others > 1 ? `One of ${others} answers: compare` : "Branched off here: go back";
  return divider(from ? label : "Branched off here", () => { if (from) show(parent); });
}

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;

function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

function grow() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
}

// --- events ------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || writing().length || conversation.answers(current).length) return;
  $("input").value = "";
  grow();
  dismiss();
  send(text);
});
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("input").addEventListener("input", grow);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("drawer")) drawer(false);
  else stop();
});
$("stop").addEventListener("click", stop);
$("new-chat").addEventListener("click", newChat);
$("try-now").addEventListener("click", () => session.reconnect());
$("latest").addEventListener("click", () => { following = true; toEnd(); });
$("log").addEventListener("scroll", () => { // what scrolls up is the reader; the page itself only goes down
  const { scrollTop } = $("log");
  following = atEnd() || (following && scrollTop >= seen);
  seen = scrollTop;
  $("latest").hidden = following;
});
new ResizeObserver(() => { if (following) toEnd(); }).observe($("log"));
for (const example of EXAMPLES) $("examples").append(button(example, () => send(example)));

setUp();
start();
draw();
$("input").focus();
