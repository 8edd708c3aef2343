/** Title of the chat, and what can be done with the whole of it. */

import { useState } from "preact/hooks";
import { exportChat, exportSession, panels, remove, rename, share } from "../model/app.js";
import { IconButton } from "./icons.jsx";
import { Menu } from "./menu.jsx";

const KEY = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";

export function Header({ chat }) {
  chat.version.value; // read, to be told of changes
  const [editing, setEditing] = useState(false);
  const kept = chat.tree.size > 0;
  return (
    <header>
      <IconButton name="menu" label="Chats" class="only-narrow" aria-expanded={panels.sidebar.value} onClick={() => { panels.sidebar.value = !panels.sidebar.value; }} />
      {editing ? <TitleInput chat={chat} done={() => setEditing(false)} /> : (
        <h1 class="title" dir="auto" onDblClick={() => kept && !chat.watching && setEditing(true)}>{kept ? chat.record.title : "New chat"}</h1>
      )}
      <button type="button" class="quiet only-wide" title="Commands" onClick={() => { panels.palette.value = true; }}><kbd>{KEY} K</kbd></button>
      <IconButton name="tree" label="Tree of this chat (Alt+T)" aria-pressed={panels.tree.value} onClick={() => { panels.tree.value = !panels.tree.value; }} />
      {kept && !chat.watching && (
        <Menu label="More for this chat" items={[
          ["Rename", () => setEditing(true)],
          ["Copy a link to watch live", () => share(chat)],
          ["Export as Markdown", () => exportChat(chat.id, "markdown")],
          ["Export as JSON", () => exportChat(chat.id, "json")],
          ["Export session", () => exportSession(chat)],
          ["Print", () => print()],
          ["Delete", () => remove(chat.id), "bad"],
        ]} />
      )}
    </header>
  );
}

function TitleInput({ chat, done }) {
  const finish = (event) => { rename(chat.id, event.target.value); done(); };
  return (
    <input class="title" aria-label="Title of this chat" defaultValue={chat.record.title} maxLength={200} ref={(each) => each?.focus()}
      onBlur={finish} onKeyDown={(event) => {
        if (event.key === "Enter") event.target.blur();
        if (event.key === "Escape") { event.stopPropagation(); event.target.value = chat.record.title; event.target.blur(); }
      }} />
  );
}
