/** Title of the chat, and what can be done with the whole of it. */

import { useState } from "preact/hooks";
import { exportChat, exportSession, newChat, panels, remove, rename, server, share, toggleSidebar } from "../model/app.js";
import { settings } from "../model/settings.js";
import { t } from "../strings.js";
import { IconButton } from "./icons.jsx";
import { Menu } from "./menu.jsx";
import { about, nameOf } from "./sidebar.jsx";

const APPLE = /Mac|iPhone|iPad/.test(navigator.platform);

export function Header({ chat }) {
  chat.version.value; // read, to be told of changes
  const [editing, setEditing] = useState(false);
  const kept = chat.tree.size > 0;
  const model = server.value?.model;
  return (
    <header>
      <IconButton name="menu" label={t.showChats} class="only-narrow" aria-expanded={panels.sidebar.value} onClick={toggleSidebar} />
      <IconButton name="sidebar" label={`${settings.value.folded ? t.unfoldChats : t.foldChats} (${t.ctrl}+B)`} class="only-wide" aria-expanded={!settings.value.folded} onClick={toggleSidebar} />
      <IconButton name="plus" label={t.newChatKey} class="only-folded" onClick={newChat} />
      {editing ? <TitleInput chat={chat} done={() => setEditing(false)} /> : (
        <h1 class="title" dir="auto" onDblClick={() => kept && !chat.watching && setEditing(true)}>{kept ? chat.record.title : t.newChat}</h1>
      )}
      {model && <span class="model only-folded" title={about(model)}>{nameOf(model)}</span>}
      <button type="button" class="quiet only-wide" title={t.commands} onClick={() => { panels.palette.value = true; }}><kbd>{APPLE ? "⌘" : t.ctrl} K</kbd></button>
      <IconButton name="tree" label={t.treeKey} aria-pressed={panels.tree.value} onClick={() => { panels.tree.value = !panels.tree.value; }} />
      {kept && !chat.watching && (
        <Menu label={t.moreForChat} items={[
          [t.rename, () => setEditing(true)],
          [t.copyWatchLink, () => share(chat)],
          [t.exportMarkdown, () => exportChat(chat.id, "markdown")],
          [t.exportJson, () => exportChat(chat.id, "json")],
          [t.exportSession, () => exportSession(chat)],
          [t.print, () => print()],
          [t.delete, () => remove(chat.id), "bad"],
        ]} />
      )}
    </header>
  );
}

function TitleInput({ chat, done }) {
  const finish = (event) => { rename(chat.id, event.target.value); done(); };
  return (
    <input class="title" aria-label={t.titleOfChat} defaultValue={chat.record.title} maxLength={200} ref={(each) => each?.focus()}
      onBlur={finish} onKeyDown={(event) => {
        if (event.key === "Enter") event.target.blur();
        if (event.key === "Escape") { event.stopPropagation(); event.target.value = chat.record.title; event.target.blur(); }
      }} />
  );
}
