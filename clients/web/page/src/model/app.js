/**
 * What the page knows: the list of chats, the one that is shown, the server, and which panels are open.
 * Components read signals; what a click does is a function here or a method of the chat.
 */

import { batch, effect, signal } from "@preact/signals";
import { Replaced } from "../../../lib/index.js";
import { copied } from "../render/clipboard.js";
import { Chat, explain } from "./chat.js";
import { askServer, connection, endSession, hasToken, server, sessionOf, setToken } from "./connection.js";
import { t } from "../strings.js";
import { offered, set, settings } from "./settings.js";
import { Store } from "./store.js";
import { MOST_BYTES, download, fromBranches, fromJson, toJson, toMarkdown } from "./transfer.js";
import { unique } from "./tree.js";
import { Watched } from "./watched.js";

export { server };

const UNDO_MS = 10_000;
const MOST_DELETED_MS = 90 * 86_400_000; // a deleted chat's session is asked to end for so long: servers keep none longer unless told to

/** @type {import("@preact/signals").Signal<import("./store.js").Record[]>} */ export const chats = signal([]);
/** @type {import("@preact/signals").Signal<Chat | null>} */ export const current = signal(null);
/** @type {import("@preact/signals").Signal<{text: string, action?: [string, () => void], mild?: boolean} | null>} */
export const toast = signal(null);
/** Which panel or dialog is open. */
export const panels = { sidebar: signal(false), tree: signal(false), palette: signal(false), settings: signal(false), format: signal(false), keys: signal(false), token: signal(null) };

const NARROW = matchMedia("(max-width: 48rem)"); // as in narrow.css

/** The list of chats is a drawer where there is little room, else it folds away and stays so. */
export function toggleSidebar() {
  if (NARROW.matches) panels.sidebar.value = !panels.sidebar.value;
  else set({ folded: !settings.value.folded });
}

let store;
/** Chats that are connected, also those that are not shown while something runs in them. @type {Map<string, Chat>} */
const open = new Map();

export async function start() {
  store = await Store.open();
  store.onchange(changedElsewhere);
  chats.value = (await store.chats()).filter(({ deleted }) => !deleted);
  forgetAll((await store.chats()).filter(({ deleted }) => deleted));
  navigator.storage?.persist?.().catch(() => {});
  if (!store.durable) toast.value = { mild: true, text: t.keepsNothing };
  addEventListener("hashchange", () => { if (location.hash.startsWith("#watch=")) location.reload(); });
  const place = new URLSearchParams(location.hash.slice(1));
  if (place.has("watch")) {
    const [session, key] = place.get("watch").split(" ");
    current.value = new Watched({ session, key, connection: connection() });
    return greet();
  }
  const id = place.get("chat");
  const found = chats.value.find((each) => each.id === id);
  await (found ? openChat(found.id) : newChat());
  addEventListener("pagehide", () => { for (const chat of open.values()) chat.flush(); });
  greet();
}

/** The browser offers to install the page; null: it does not. */
export const installable = signal(null);

addEventListener("beforeinstallprompt", (event) => { installable.value = event; });
addEventListener("appinstalled", () => { installable.value = null; });
navigator.serviceWorker?.register("sw.js").catch(() => {}); // private windows and some settings forbid it

// --- the server ----------------------------------------------------------------------------------------

/** Whether the server has been asked: what it says has its place before anything below is drawn, so that nothing jumps. */
export const greeted = signal(false);

async function greet() {
  const said = await askServer();
  batch(() => {
    greeted.value = true;
    if (said?.refused) panels.token.value = { error: hasToken() ? t.tokenRefused : "" };
    else if (said) server.value = said;
  });
}

/** A token was typed in. */
export function login(text) {
  setToken(text);
  panels.token.value = null;
  greet();
  const chat = current.value;
  if (chat?.watching) location.reload();
  else if (chat?.session) openChat(chat.id, { again: true });
}

// --- chats -------------------------------------------------------------------------------------------------

export async function newChat() {
  const now = Date.now();
  await show(make({ record: { id: unique(), title: t.newChat, created: now, updated: now, client: `page-${unique()}`, epoch: 0, names: 1, ...offered() } }));
  location.hash = "";
}

/** A chat that has not begun follows the settings of tools. */
effect(() => {
  const chat = current.value;
  const now = offered();
  if (chat && !chat.watching && !chat.tree.size) chat.offer(now);
});

/** Show a chat. `again`: read it from the store and connect anew (it was open in another tab, or needs a token). */
export async function openChat(id, { again = false } = {}) {
  let chat = open.get(id);
  if (chat && again) {
    open.delete(id);
    await chat.leave();
    chat = null;
  }
  if (!chat) {
    const record = await store.chat(id) ?? current.value?.record;
    if (!record) return;
    chat = make({ record, messages: await store.messages(id) });
  }
  await show(chat);
  chat.open();
  history.replaceState(null, "", `#chat=${id}`);
}

function make(parts) {
  const chat = new Chat({ ...parts, store, connection: connection() });
  open.set(chat.id, chat);
  chat.status.subscribe(({ status, error }) => {
    if (status === "closed") closed(chat, error);
    if (status === "open" && !server.value) greet(); // it was still loading its model
  });
  chat.version.subscribe(() => noted(chat));
  return chat;
}

async function show(chat) {
  const before = current.value;
  if (before?.watching) before.leave();
  batch(() => {
    current.value = chat;
    panels.sidebar.value = false;
    toast.value = toast.value?.action ? toast.value : null;
  });
  if (before && before !== chat && !before.watching) release(before);
}

/** A chat that is not shown needs no connection, unless something runs in it. */
async function release(chat) {
  if (chat.record.deleted) return; // it was left then
  if (chat.tree.size === 0) {
    open.delete(chat.id);
    await chat.end();
    return;
  }
  if (chat.busy) {
    const stop = chat.version.subscribe(() => {
      if (chat.busy) return;
      setTimeout(() => stop());
      if (current.value !== chat) release(chat);
    });
    return;
  }
  open.delete(chat.id);
  await chat.leave();
}

/** The list shows what a chat is called now. */
function noted(chat) {
  if (!chat.tree.size || chat.record.deleted) return;
  const others = chats.value.filter(({ id }) => id !== chat.id);
  chats.value = [{ ...chat.record, busy: chat.busy }, ...others].sort((a, b) => b.updated - a.updated);
  if (current.value === chat && !location.hash.includes(chat.id)) history.replaceState(null, "", `#chat=${chat.id}`);
}

async function changedElsewhere(id) {
  if (open.has(id)) return;
  const record = await store.chat(id);
  const others = chats.value.filter((each) => each.id !== id);
  chats.value = (record && !record.deleted ? [record, ...others] : others).sort((a, b) => b.updated - a.updated);
}

function closed(chat, error) {
  if (current.value !== chat || !error) return;
  if (error.code === "unauthorized") panels.token.value = { error: hasToken() ? error.message : "" };
  else if (error instanceof Replaced) {
    toast.value = { mild: true, text: t.otherTab, action: [t.useHere, () => openChat(chat.id, { again: true })] };
  } else {
    toast.value = { text: t.connectionEnded(error.message), action: [t.connectAgain, () => openChat(chat.id, { again: true })] };
  }
}

/** Put a link to watch this chat on the clipboard. */
export async function share(chat) {
  chat.open();
  const link = chat.viewLink;
  if (!link) { toast.value = { text: t.noLinkYet }; return; }
  const done = await copied(link);
  const local = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  const where = local ? t.linkLocal : "";
  toast.value = { mild: true, text: done ? `${t.linkCopied}${where}` : t.linkIs(link) };
}

export function rename(id, title) {
  const chat = open.get(id);
  if (chat) return chat.rename(title);
  return change(id, { title: title.trim().slice(0, 200) || t.newChat, named: true });
}

async function change(id, changes) {
  const record = { ...await store.chat(id), ...changes };
  await store.save(record);
  const others = chats.value.filter((each) => each.id !== id);
  chats.value = (record.deleted ? others : [record, ...others]).sort((a, b) => b.updated - a.updated);
}

/** Forget a chat for good, here and on the server. If that fails, it is tried again after `pause` ms, and when the page starts. */
async function forget(id, pause = 1_000) {
  const done = await unlessOffered(id, () => forgotten(id)).catch(() => false);
  if (!done) setTimeout(forget, pause, id, Math.min(2 * pause, 3_600_000));
}

/** @returns {Promise<boolean>} false: the server has not confirmed it */
async function forgotten(id) {
  const { session, key, client, deleted } = await store.chat(id) ?? {};
  if (!deleted) return true; // it was had back, or another tab was first
  if (!navigator.locks && Date.now() - deleted < UNDO_MS) return false; // another tab may offer it still
  if (session && Date.now() - deleted < MOST_DELETED_MS) {
    await store.remove(id, { id, session, key, client, deleted, title: "", created: 0, updated: 0 });
    if (!await endSession({ session, key, client })) return false;
  }
  await store.remove(id);
  return true;
}

const undoLock = (id) => `ramify undo ${id}`;

/** Run `act` unless a tab offers to have the chat back. Browsers have locks in secure contexts alone. @returns {Promise<boolean>} */
async function unlessOffered(id, act) {
  return navigator.locks ? navigator.locks.request(undoLock(id), { ifAvailable: true }, (lock) => lock !== null && act()) : act();
}

/** Keep all tabs from forgetting a chat until the result is called, or this tab is closed. @returns {Promise<() => void>} */
async function offerUndo(id) {
  return new Promise((offered) => {
    const held = () => new Promise((release) => { offered(release); });
    if (navigator.locks) navigator.locks.request(undoLock(id), held);
    else offered(() => {});
  });
}

async function forgetAll(records) {
  for (const { id } of records) await forget(id);
}

/** Delete a chat; for a while it can be had back. */
export async function remove(id) {
  const chat = open.get(id);
  const { title } = chats.value.find((each) => each.id === id);
  if (chat) {
    chat.stop();
    chat.record.deleted = Date.now(); // for whatever saves it from now on
    await chat.leave();
    open.delete(id);
  }
  const over = await offerUndo(id);
  await change(id, { deleted: Date.now() });
  if (current.value?.id === id) await newChat();
  const timer = setTimeout(() => { over(); forget(id); if (toast.value?.id === id) toast.value = null; }, UNDO_MS);
  toast.value = {
    id, mild: true, text: t.chatDeleted(title),
    action: [t.undo, async () => { clearTimeout(timer); await change(id, { deleted: undefined }); over(); await openChat(id); }],
  };
}

/** Chats whose title or messages hold some words. @returns {Promise<import("./store.js").Record[]>} */
export async function search(words) {
  const wanted = words.trim().toLowerCase();
  if (!wanted) return chats.value;
  const within = await store.search(wanted);
  return chats.value.filter(({ id, title }) => within.has(id) || title.toLowerCase().includes(wanted));
}

// --- files ---------------------------------------------------------------------------------------------------

async function whole(id) {
  await open.get(id)?.flush();
  return { record: await store.chat(id), messages: await store.messages(id) };
}

export async function exportChat(id, format) {
  const chat = await whole(id);
  if (!chat.record) return;
  if (format === "markdown") download(chat.record.title, ".md", toMarkdown(chat), "text/markdown");
  else download(chat.record.title, ".json", toJson([chat]), "application/json");
}

/** The chat's session as a file, which another server with the same model goes on with. */
export async function exportSession(chat) {
  try {
    chat.open();
    download(chat.record.title, ".session", await chat.exported(), "application/octet-stream");
  } catch (error) {
    toast.value = { text: explain(error) };
  }
}

/** A new chat that goes on with the session of a file. */
export async function openSession(file) {
  try {
    if (file.size > MOST_BYTES) throw new Error(t.fileTooBig(file.size, MOST_BYTES));
    const client = `page-${unique()}`;
    const { state, login } = await sessionOf(new Uint8Array(await file.arrayBuffer()), client);
    const { record, messages } = fromBranches(state);
    const complete = { ...record, ...login, id: unique(), client };
    await store.save(complete, messages);
    await openChat(make({ record: complete, messages }).id);
    toast.value = { mild: true, text: t.goesOnHere(record.title) };
  } catch (error) {
    toast.value = { text: explain(error) };
  }
}

export async function exportAll() {
  const all = await Promise.all(chats.value.map(({ id }) => whole(id)));
  download(t.exportName(new Date().toISOString().slice(0, 10)), ".json", toJson(all), "application/json");
}

export async function importFile(file) {
  try {
    const found = fromJson(await file.text());
    for (const { record, messages } of found) {
      const complete = { ...record, id: unique(), client: `page-${unique()}`, epoch: 0, names: 1 };
      await store.save(complete, messages);
      chats.value = [complete, ...chats.value];
    }
    if (found.length === 1) await openChat(chats.value[0].id);
    toast.value = { mild: true, text: found.length === 1 ? t.imported(found[0].record.title) : t.importedMany(found.length) };
  } catch (error) {
    toast.value = { text: error.message };
  }
}

