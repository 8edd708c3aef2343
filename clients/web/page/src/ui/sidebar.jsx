/** The list of chats: search, rename, delete, import and export. */

import { useEffect, useRef, useState } from "preact/hooks";
import { chats, current, exportAll, exportChat, importFile, newChat, openChat, openSession, panels, remove, rename, search, server } from "../model/app.js";
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
    <aside class="sidebar" aria-label="Chats">
      <div class="brand">
        <img src="icon.svg" alt="" width="22" height="22" /><span>Ramify</span>
        <IconButton name="plus" label="New chat (Ctrl+Shift+O)" onClick={newChat} />
      </div>
      <label class="search"><Icon name="search" /><span class="unseen">Search chats</span>
        <input type="search" placeholder="Search" value={words} onInput={(event) => setWords(event.target.value)} />
      </label>
      <nav aria-label="Chats">
        {groups(found ?? all).map(([label, members]) => (
          <section key={label}>
            <h2>{label}</h2>
            <ul>{members.map((record) => <Row key={record.id} record={record} />)}</ul>
          </section>
        ))}
        {found?.length === 0 && <p class="soft">Nothing holds these words.</p>}
        {!found && all.length === 0 && <p class="soft">Chats are kept in this browser, until you delete them. {kept(server.value)} The first one starts with your message.</p>}
      </nav>
      <footer>
        <Server />
        <Menu label="All chats" items={[
          ["Import chats", () => file.current.click()],
          ["Open a session file", () => session.current.click()],
          all.length ? ["Export all chats", exportAll] : null,
          ["Game of 24: a tree of thought", () => { location.href = "game24.html"; }],
        ]} />
        <IconButton name="settings" label="Settings (Ctrl+,)" onClick={() => { panels.settings.value = true; }} />
        <FileInput input={file} label="File to import" accept="application/json,.json" take={importFile} />
        <FileInput input={session} label="Session file to open" accept=".session" take={openSession} />
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
      <li><input class="rename" aria-label="Title" defaultValue={record.title} maxLength={200} ref={(each) => each?.focus()}
        onBlur={(event) => { rename(record.id, event.target.value); setEditing(false); }}
        onKeyDown={(event) => { if (event.key === "Enter") event.target.blur(); if (event.key === "Escape") { event.target.value = record.title; event.target.blur(); } }} /></li>
    );
  }
  return (
    <li class={here ? "here" : ""}>
      <button type="button" class="pick" aria-current={here ? "true" : undefined} title={record.title} dir="auto" onClick={() => openChat(record.id)}>
        {record.busy && <span class="pulse" aria-label="An answer is being written" />}{record.title}
      </button>
      <Menu label={`More for ${record.title}`} class="row-menu" items={[
        ["Rename", () => setEditing(true)],
        ["Export as Markdown", () => exportChat(record.id, "markdown")],
        ["Export as JSON", () => exportChat(record.id, "json")],
        ["Delete", () => remove(record.id), "bad"],
      ]} />
    </li>
  );
}

/** The connection and the model. */
function Server() {
  const status = current.value?.status.value.status ?? "idle";
  const model = server.value?.model;
  const words = { open: "Connected", connecting: "Connecting", waiting: "Connection lost", offline: "No network", draining: "Server restarts", closed: "Not connected", idle: server.value ? "Ready" : "Connecting" }[status];
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
  if (!persist || persist === "none") return "The server saves none of them.";
  return `The server saves them too, for ${days === 1 ? "a day" : days < 1 ? "less than a day" : `${Math.round(days)} days`} after their last use.`;
}

export const nameOf = ({ model }) => (model === "default_model" ? "Small demo model" : model);
export const about = ({ parameters, device, context }) => `${parameters >= 1e9 ? `${(parameters / 1e9).toFixed(1)} B` : `${Math.round(parameters / 1e6)} M`} parameters, ${device}, context ${context.toLocaleString()}`;

function groups(records) {
  const today = new Date().setHours(0, 0, 0, 0);
  const label = ({ updated }) => (updated >= today ? "Today" : updated >= today - DAY_MS ? "Yesterday" : updated >= today - 7 * DAY_MS ? "This week" : "Earlier");
  const found = new Map();
  for (const record of records) found.set(label(record), [...found.get(label(record)) ?? [], record]);
  return [...found];
}
