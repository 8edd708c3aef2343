/** The list of chats: search, rename, delete, import and export. */

import { useEffect, useRef, useState } from "preact/hooks";
import { chats, current, exportAll, exportChat, greeted, importFile, newChat, openChat, openSession, panels, remove, rename, search, server } from "../model/app.js";
import { TTL_S } from "../model/chat.js";
import { number, t } from "../strings.js";
import { Icon, IconButton } from "./icons.jsx";
import { Menu } from "./menu.jsx";

const DAY_MS = 86_400_000;
const SEARCH_MS = 150;

export function Sidebar() {
  const [words, setWords] = useState("");
  const [found, setFound] = useState(null);
  const file = useRef(null);
  const session = useRef(null);
  const all = chats.value;
  useEffect(() => {
    if (!words.trim()) { setFound(null); return undefined; }
    const timer = setTimeout(async () => setFound(await search(words)), SEARCH_MS);
    return () => clearTimeout(timer);
  }, [words, all]);
  return (
    <aside class="sidebar" aria-label={t.chats}>
      <div class="brand">
        <img src="icon.svg" alt="" width="22" height="22" /><span>Ramify</span>
        <IconButton name="plus" label={t.newChatKey} onClick={newChat} />
      </div>
      <label class="search"><Icon name="search" /><span class="unseen">{t.searchChats}</span>
        <input type="search" placeholder={t.search} value={words} onInput={(event) => setWords(event.target.value)} />
      </label>
      <nav aria-label={t.chats}>
        {groups(found ?? all).map(([label, members]) => (
          <section key={label}>
            <h2>{label}</h2>
            <ul>{members.map((record) => <Row key={record.id} record={record} />)}</ul>
          </section>
        ))}
        {found?.length === 0 && <p class="soft">{t.nothingFound}</p>}
        {!found && all.length === 0 && greeted.value && <p class="soft">{t.chatsAreKept} {kept(server.value)} {t.firstStarts}</p>}
      </nav>
      <footer>
        <Server />
        <Menu label={t.allChats} items={[
          [t.importChats, () => file.current.click()],
          [t.openSessionFile, () => session.current.click()],
          all.length ? [t.exportAll, exportAll] : null,
          [t.game24, () => { location.href = "game24.html"; }],
        ]} />
        <IconButton name="settings" label={t.settingsKey} onClick={() => { panels.settings.value = true; }} />
        <FileInput input={file} label={t.fileToImport} accept="application/json,.json" take={importFile} />
        <FileInput input={session} label={t.fileOfSession} accept=".session" take={openSession} />
      </footer>
    </aside>
  );
}

/** Where the browser's dialog puts the file that was chosen. */
function FileInput({ input, label, accept, take }) {
  return (
    <input type="file" ref={input} hidden accept={accept} aria-label={label}
      onChange={async (event) => { const [chosen] = event.target.files; if (chosen) await take(chosen); event.target.value = ""; }} />
  );
}

function Row({ record }) {
  const [editing, setEditing] = useState(false);
  const here = current.value?.id === record.id;
  if (editing) {
    return (
      <li><input class="rename" aria-label={t.title} defaultValue={record.title} maxLength={200} ref={(each) => each?.focus()}
        onBlur={(event) => { rename(record.id, event.target.value); setEditing(false); }}
        onKeyDown={(event) => { if (event.key === "Enter") event.target.blur(); if (event.key === "Escape") { event.target.value = record.title; event.target.blur(); } }} /></li>
    );
  }
  return (
    <li class={here ? "here" : ""}>
      <button type="button" class="pick" aria-current={here ? "true" : undefined} title={record.title} dir="auto" onClick={() => openChat(record.id)}>
        {record.busy && <span class="pulse" aria-label={t.isWritten} />}{record.title}
      </button>
      <Menu label={t.moreFor(record.title)} class="row-menu" items={[
        [t.rename, () => setEditing(true)],
        [t.exportMarkdown, () => exportChat(record.id, "markdown")],
        [t.exportJson, () => exportChat(record.id, "json")],
        [t.delete, () => remove(record.id), "bad"],
      ]} />
    </li>
  );
}

/** The connection and the model. */
function Server() {
  const status = current.value?.status.value.status ?? "idle";
  const model = server.value?.model;
  const words = { open: t.connected, connecting: t.connecting, waiting: t.connectionLost, offline: t.noNetwork, draining: t.serverRestarts, closed: t.notConnected, idle: server.value ? t.ready : t.connecting }[status];
  const seen = status === "idle" && server.value ? "open" : status;
  return (
    <p class="server" data-status={seen} role="status" title={model ? `${model.model}: ${about(model)}` : words}>
      <span class="dot" aria-hidden="true" /><span><b>{model ? nameOf(model) : "Ramify"}</b><br />{words}</span>
    </p>
  );
}

/** What the server keeps. */
function kept(info) {
  if (!info) return "";
  const { persist, days = 0 } = info.sessions ?? {};
  if (!persist || persist === "none") return t.serverKeepsNone;
  return t.serverKeeps(Math.min(days * 86_400, TTL_S));
}

export const nameOf = ({ model }) => (model === "default_model" ? t.smallDemo : model);
export const about = ({ parameters, device, context }) => t.aboutModel(parameters >= 1e9 ? t.billion(parameters / 1e9) : t.million(parameters / 1e6), device, context);

function groups(records) {
  const today = new Date().setHours(0, 0, 0, 0);
  const label = ({ updated }) => (updated >= today ? t.today : updated >= today - DAY_MS ? t.yesterday : updated >= today - 7 * DAY_MS ? t.thisWeek : t.earlier);
  const found = new Map();
  for (const record of records) found.set(label(record), [...found.get(label(record)) ?? [], record]);
  return [...found];
}
