/** The command palette: everything the page can do, found by typing. */

import { useEffect, useRef, useState } from "preact/hooks";
import { chats, current, exportAll, exportChat, exportSession, installable, newChat, openChat, panels, remove, share, toggleSidebar } from "../model/app.js";
import { options, set } from "../model/settings.js";
import { LANGUAGES, t } from "../strings.js";

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
    <dialog class="palette" ref={dialog} aria-label={t.commands} onClose={close} onClick={(event) => { if (event.target === event.currentTarget) close(); }}>
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
      <input role="combobox" aria-expanded="true" aria-controls="commands" aria-activedescendant={found[at] ? `command-${at}` : undefined} aria-label={t.commandOrChat}
        placeholder={t.typeACommand} value={words} ref={(each) => each?.focus()}
        onInput={(event) => { setWords(event.target.value); setAt(0); }} onKeyDown={keys} />
      <ul id="commands" role="listbox" aria-label={t.commands} ref={list}>
        {found.map((command, i) => (
          <li id={`command-${i}`} role="option" key={command[0]} aria-selected={i === at} onPointerEnter={() => setAt(i)} onClick={() => run(command)}>
            <span>{command[0]}</span>{command[2] && <kbd>{command[2]}</kbd>}
          </li>
        ))}
      </ul>
      {!found.length && <p class="soft">{t.noCommand}</p>}
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
    [t.newChat, newChat, `${t.ctrl}+${t.shift}+O`],
    [t.showTree, () => { panels.tree.value = !panels.tree.value; }, "Alt+T"],
    [t.showSidebar, toggleSidebar, `${t.ctrl}+B`],
    [t.keyboard, () => { panels.keys.value = true; }, "?"],
    [t.settings, () => { panels.settings.value = true; }, `${t.ctrl}+,`],
    [t.formatCommand, () => { panels.format.value = true; }],
    [t.coloursLight, () => set({ theme: "light" })],
    [t.coloursDark, () => set({ theme: "dark" })],
    [t.coloursSystem, () => set({ theme: "system" })],
    ...Object.entries(LANGUAGES).map(([code, name]) => [t.languageIs(name), () => set({ language: code })]),
    [t.game24, () => { location.href = "game24.html"; }],
  ];
  if (question) {
    commands.push([t.explore(3), () => explore(3)], [t.explore(8), () => explore(8)]);
    if (chat.tree.drafts(question).length > 1) commands.push([t.compareDrafts, () => chat.compare(question, true)]);
  }
  if (answer) commands.push([t.retryLast, () => { chat.open(); chat.retry(answer, { options: options(chat) }); }]);
  if (chat?.busy) commands.push([t.stop, () => chat.stop(), "Esc"]);
  if (chat?.tree.size) {
    commands.push([t.copyWatch, () => share(chat)]);
    commands.push([t.exportThisMarkdown, () => exportChat(chat.id, "markdown")], [t.exportThisJson, () => exportChat(chat.id, "json")],
      [t.exportThisSession, () => exportSession(chat)], [t.printThis, () => setTimeout(print, 100)], [t.deleteThis, () => remove(chat.id)]);
  }
  if (installable.value) commands.push([t.install, () => installable.value.prompt()]);
  if (chats.value.length) commands.push([t.exportAll, exportAll]);
  const used = new Set(commands.map(([label]) => label));
  const others = chats.value.filter(({ id }) => id !== chat?.id).map(({ id, title }) => [t.chatCalled(title), () => openChat(id)]);
  return [...commands, ...others.filter(([label]) => !used.has(label) && used.add(label))];
}

