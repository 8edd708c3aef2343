/** Chats as files: JSON that can be imported again, and Markdown to read. Pure. */

import { messagesOf } from "./branches.js";
import { t } from "../strings.js";
import { isObject } from "./form.js";
import { MARK, Tree, brief, contentOf, unique } from "./tree.js";

const FORMAT = "ramify chats 1";
export const MOST_BYTES = 64 << 20;
const MOST_SCHEMA = 256 << 10; // characters
const PICTURE = /^image\/(png|jpeg|webp|gif)$/;
const BASE64 = /^[A-Za-z0-9+/]+={0,2}$/;
const ROLES = ["user", "assistant", "tool"];

/** @param {{record: object, messages: object[]}[]} chats */
export function toJson(chats) {
  const plain = chats.map(({ record, messages }) => ({
    title: record.title, created: record.created, updated: record.updated, chosen: record.chosen, system: record.system,
    messages: messages.filter(({ gone }) => !gone).map(({ place, op, start, ...rest }) => ({ ...rest, state: "done" })),
  }));
  return JSON.stringify({ format: FORMAT, chats: plain }, null, 1);
}

/**
 * Chats of a file, with new ids, so that importing twice changes nothing that is there.
 * @returns {{record: object, messages: object[]}[]}
 * @throws {Error} which says what is wrong with the file
 */
export function fromJson(text) {
  if (text.length > MOST_BYTES) throw new Error(t.fileTooLong(text.length, MOST_BYTES));
  let file;
  try { file = JSON.parse(text); } catch (error) { throw new Error(t.noJsonFile(error.message)); }
  if (file?.format !== FORMAT || !Array.isArray(file.chats)) throw new Error(t.notExported);
  return file.chats.map(imported);
}

function imported(chat, i) {
  const wrong = (what) => new Error(t.chatUnreadable(i + 1, what));
  if (!Array.isArray(chat?.messages)) throw wrong(t.noMessages);
  const ids = new Map(chat.messages.map((each) => [each?.id, unique()]));
  const messages = chat.messages.map((each, at) => {
    if (typeof each?.text !== "string" || !ROLES.includes(each.role)) throw wrong(t.noText(at + 1));
    if (each.parent != null && !ids.has(each.parent)) throw wrong(t.noParent(at + 1));
    return { ...fields(each), id: ids.get(each.id), parent: ids.get(each.parent) ?? null, chosen: ids.get(each.chosen), state: "done", place: null };
  });
  if (looped(messages)) throw wrong(t.inACircle);
  const now = Date.now();
  const record = { title: String(chat.title ?? t.importedChat).slice(0, 200), named: true, created: Number(chat.created) || now, updated: now, chosen: ids.get(chat.chosen) };
  if (typeof chat.system === "string") record.system = chat.system;
  return { record, messages };
}

function fields({ role, text, created, system, files, calls, results, usage, reason, thoughtMs, merged, json, schema, corrected }) {
  const known = { role, text, created: Number(created) || 0, reason, thoughtMs: Number(thoughtMs) || undefined };
  if (typeof system === "string") known.system = system;
  if (Array.isArray(files)) known.files = files.map(file);
  if (Array.isArray(calls)) known.calls = calls.map(({ id, name, arguments: args }) => ({ ...(id && { id: String(id) }), name: String(name), arguments: String(args) }));
  if (role === "tool") known.results = (Array.isArray(results) ? results : []).map(({ id, name, text: body }) => ({ ...(id && { id: String(id) }), name: String(name), text: String(body) }));
  if (usage && typeof usage === "object") known.usage = Object.fromEntries(Object.entries(usage).filter(([, value]) => Number.isFinite(value)));
  if (Array.isArray(merged)) known.merged = [];
  if (json === true) known.json = true;
  if (json === true && isObject(schema) && JSON.stringify(schema).length <= MOST_SCHEMA) known.schema = schema;
  if (corrected === true) known.corrected = true;
  return known;
}

function file({ name, text = "", picture, type }) {
  if (typeof picture !== "string") return { name: String(name), text: String(text) };
  if (!PICTURE.test(type) || !BASE64.test(picture)) throw new Error(t.noPicture(name));
  return { name: String(name), picture, type };
}

function looped(messages) {
  const parents = new Map(messages.map(({ id, parent }) => [id, parent]));
  const good = new Set([null]);
  for (const { id } of messages) {
    const way = new Set();
    for (let at = id; !good.has(at); at = parents.get(at)) {
      if (way.has(at)) return true;
      way.add(at);
    }
    for (const each of way) good.add(each);
  }
  return false;
}

/**
 * A chat of a session's branches, which are where its messages are computed.
 * @param {import("../../../lib/index.js").StateMessage} state  with turns and texts
 * @returns {{record: object, messages: object[]}}
 */
export function fromBranches({ branches, meta, op }) {
  const epoch = 1;
  const messages = messagesOf(branches).messages.map(({ branch, end, ...rest }, i) => ({ ...rest, created: i, place: { epoch, branch, at: end } }));
  const first = messages.find(({ role }) => role === "user");
  const title = typeof meta?.title === "string" ? meta.title : first && brief(first.text, 60);
  const numbers = branches.map(({ branch }) => Number(/^b(\d{1,9})$/.exec(branch)?.[1] ?? 1));
  const now = Date.now();
  return { record: { title: title?.slice(0, 200) || t.sessionFromFile, named: true, created: now, updated: now, epoch, op, names: Math.max(1, ...numbers) }, messages };
}

/** What is shown of a chat, as Markdown. */
export function toMarkdown({ record, messages }) {
  const path = new Tree(messages, record.chosen).path();
  const parts = [`# ${record.title}`];
  if (path[0]?.system) parts.push(`> ${path[0].system.replaceAll("\n", "\n> ")}`);
  for (const each of path) {
    const who = { user: t.you, assistant: t.answer, tool: t.tools }[each.role];
    const body = each.role === "tool" ? each.results.map(({ name, text }) => `\`${name}\`: ${text}`).join("\n\n") : shownText(each);
    parts.push(`## ${who}`, body);
    for (const { name, arguments: args } of each.calls ?? []) parts.push(`${t.calls(name)}\n\n\`\`\`json\n${args}\n\`\`\``);
  }
  return `${parts.join("\n\n")}\n`;
}

/** Offer a text or bytes as a file, named after `title`. `ending`: of its name. */
export function download(title, ending, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = url;
  const name = title.replace(/[\\/:*?"<>|\u0000-\u001f]+/g, " ").slice(0, 100).replace(/^[\s.]+|[\s.]+$/g, "");
  link.download = (name || "chat") + ending;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** What a person said, with the names of pictures in their place. */
function shownText(message) {
  const pictures = (message.files ?? []).filter(({ picture }) => picture).map(({ name }) => `*${t.pictureNamed(name)}*`);
  return [...pictures, contentOf(message).replaceAll(MARK, "")].filter(Boolean).join("\n\n");
}
