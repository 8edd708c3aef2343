/** The command palette: everything the page can do, found by typing. */

import { useEffect, useRef, useState } from "preact/hooks";
import { chats, current, exportAll, exportChat, exportSession, newChat, openChat, panels, remove, share } from "../model/app.js";
import { options, set } from "../model/settings.js";

const MOST = 12;

export function Palette() {
  const open = panels.palette.value;
  const dialog = useRef(null);
  useEffect(() => {
    if (open && !dialog.current.open) dialog.current.showModal();
    if (!open && dialog.current.open) dialog.current.close();
  }, [open]);
  const close = () => { panels.palette.value = false; };
  return (
    <dialog class="palette" ref={dialog} aria-label="Commands" onClose={close} onClick={(event) => { if (event.target === event.currentTarget) close(); }}>
      {open && <Commands close={close} />}
    </dialog>
  );
}

function Commands({ close }) {
  const [words, setWords] = useState("");
  const [at, setAt] = useState(0);
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = all().filter(([label]) => wanted.every((each) => label.toLowerCase().includes(each))).slice(0, MOST);
  const list = useRef(null);
  useEffect(() => { list.current?.children[at]?.scrollIntoView({ block: "nearest" }); }, [at]);
  const run = (command) => { if (!command) return; close(); command[1](); };
  const keys = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && found.length) { event.preventDefault(); setAt((at + step + found.length) % found.length); }
    if (event.key === "Enter") { event.preventDefault(); run(found[at]); }
  };
  return (
    <>
      <input role="combobox" aria-expanded="true" aria-controls="commands" aria-activedescendant={found[at] ? `command-${at}` : undefined} aria-label="Command or chat"
        placeholder="Type a command, or the title of a chat" value={words} ref={(each) => each?.focus()}
        onInput={(event) => { setWords(event.target.value); setAt(0); }} onKeyDown={keys} />
      <ul id="commands" role="listbox" aria-label="Commands" ref={list}>
        {found.map((command, i) => (
          <li id={`command-${i}`} role="option" key={command[0]} aria-selected={i === at} onPointerEnter={() => setAt(i)} onClick={() => run(command)}>
            <span>{command[0]}</span>{command[2] && <kbd>{command[2]}</kbd>}
          </li>
        ))}
      </ul>
      {!found.length && <p class="soft">No command or chat is called so.</p>}
    </>
  );
}

function all() {
  const chat = current.value?.watching ? null : current.value;
  const path = chat?.tree.path() ?? [];
  const question = path.findLast(({ role }) => role === "user");
  const answer = path.at(-1)?.role === "assistant" ? path.at(-1) : null;
  const explore = (count) => { chat.open(); chat.compare(question, true); chat.answer(question, { count, options: options(chat) }); };
  const commands = [
    ["New chat", newChat, "Ctrl+Shift+O"],
    ["Show or hide the tree", () => { panels.tree.value = !panels.tree.value; }, "Alt+T"],
    ["Settings", () => { panels.settings.value = true; }, "Ctrl+,"],
    ["Answer format (JSON schema)", () => { panels.format.value = true; }],
    ["Colours: light", () => set({ theme: "light" })],
    ["Colours: dark", () => set({ theme: "dark" })],
    ["Colours: as the system", () => set({ theme: "system" })],
    ["Game of 24: a tree of thought", () => { location.href = "game24.html"; }],
  ];
  if (question) {
    commands.push(["Explore: 3 more drafts", () => explore(3)], ["Explore: 8 more drafts", () => explore(8)]);
    if (chat.tree.drafts(question).length > 1) commands.push(["Compare the drafts side by side", () => chat.compare(question, true)]);
  }
  if (answer) commands.push(["Retry the last answer", () => { chat.open(); chat.retry(answer, { options: options(chat) }); }]);
  if (chat?.busy) commands.push(["Stop", () => chat.stop(), "Escape"]);
  if (chat?.tree.size) {
    commands.push(["Copy a link to watch this chat live", () => share(chat)]);
    commands.push(["Export this chat as Markdown", () => exportChat(chat.id, "markdown")], ["Export this chat as JSON", () => exportChat(chat.id, "json")],
      ["Export this chat's session, for another server", () => exportSession(chat)], ["Print this chat", () => setTimeout(print, 100)], ["Delete this chat", () => remove(chat.id)]);
  }
  if (chats.value.length) commands.push(["Export all chats", exportAll]);
  const used = new Set(commands.map(([label]) => label));
  const others = chats.value.filter(({ id }) => id !== chat?.id).map(({ id, title }) => [`Chat: ${title}`, () => openChat(id)]);
  return [...commands, ...others.filter(([label]) => !used.has(label) && used.add(label))];
}

