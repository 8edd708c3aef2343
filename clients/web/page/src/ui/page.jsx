/** The page: list of chats, the conversation, the tree beside it, and dialogs. */

import { useEffect } from "preact/hooks";
import { current, newChat, panels, toast, toggleSidebar } from "../model/app.js";
import { settings } from "../model/settings.js";
import { t } from "../strings.js";
import { Composer } from "./composer.jsx";
import { Conversation } from "./conversation.jsx";
import { FormatDialog, SettingsDialog, TokenDialog } from "./dialogs.jsx";
import { Header } from "./header.jsx";
import { Icon, IconButton } from "./icons.jsx";
import { KeysDialog } from "./keys.jsx";
import { Palette } from "./palette.jsx";
import { Sidebar } from "./sidebar.jsx";
import { TreePanel } from "./tree.jsx";

export function Page() {
  useEffect(() => {
    document.addEventListener("keydown", shortcuts);
    return () => document.removeEventListener("keydown", shortcuts);
  }, []);
  const chat = current.value;
  const shown = `${panels.sidebar.value ? " drawer" : ""}${settings.value.folded ? " folded" : ""}`;
  return (
    <div class={`page${shown}${panels.tree.value ? " with-tree" : ""}`}>
      <Skip to={chat?.watching ? "log" : "input"} />
      <Sidebar />
      <div class="shade" onClick={() => { panels.sidebar.value = false; }} />
      {chat && (
        <main key={chat.id}>
          <Header chat={chat} />
          <Connection chat={chat} />
          <Conversation chat={chat} />
          <Notices chat={chat} />
          {chat.watching ? <p class="watching"><Icon name="eye" /> {t.watching}</p> : <Composer chat={chat} />}
        </main>
      )}
      {chat && panels.tree.value && <TreePanel key={chat.id} chat={chat} />}
      <SettingsDialog />
      <FormatDialog />
      <TokenDialog />
      <KeysDialog />
      <Palette />
    </div>
  );
}

/** For who goes by keys: past the list of chats. */
function Skip({ to }) {
  return <a class="skip" href={`#${to}`} onClick={(event) => { event.preventDefault(); document.getElementById(to)?.focus(); }}>{to === "log" ? t.skipToLog : t.skip}</a>;
}

/** A bar while the connection is away. */
function Connection({ chat }) {
  const { status } = chat.status.value;
  if (!["waiting", "offline", "draining"].includes(status)) return null;
  const words = { waiting: `${t.connectionLost}.`, offline: `${t.noNetwork}.`, draining: t.serverIsRestarting }[status];
  return (
    <div class="bar" role="status">
      <span>{words} {t.nothingIsLost}</span>
      <button type="button" class="small" onClick={() => chat.reconnect()}>{t.tryNow}</button>
    </div>
  );
}

function Notices({ chat }) {
  return (
    <>
      <Notice what={chat.notice.value} dismiss={() => { chat.notice.value = null; }} />
      <Notice what={toast.value} dismiss={() => { toast.value = null; }} />
    </>
  );
}

function Notice({ what, dismiss }) {
  if (!what) return null;
  const { text, action, mild } = what;
  return (
    <div class={`notice${mild ? " mild" : ""}`} role={mild ? "status" : "alert"}>
      <span>{text}</span>
      {action && <button type="button" class="small" onClick={() => { dismiss(); action[1](); }}>{action[0]}</button>}
      <IconButton name="close" label={t.dismiss} onClick={dismiss} />
    </div>
  );
}

/** Keys that work everywhere. */
function shortcuts(event) {
  const control = event.ctrlKey || event.metaKey;
  const { code } = event; // the key's place: Alt and other alphabets change `event.key`
  const does = (action) => { event.preventDefault(); action(); };
  if (control && code === "KeyK") return does(() => { panels.palette.value = !panels.palette.value; });
  if (control && event.shiftKey && code === "KeyO") return does(newChat);
  if (event.altKey && code === "KeyT") return does(() => { panels.tree.value = !panels.tree.value; });
  if (control && !event.shiftKey && code === "KeyB") return does(toggleSidebar);
  if (control && event.key === ",") return does(() => { panels.settings.value = true; });
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (panels.sidebar.value) panels.sidebar.value = false;
    else if (!event.target.closest?.("form.edit, [role=menu]")) current.value?.stop();
    return undefined;
  }
  if (event.target.closest?.("input, textarea, select, dialog")) return undefined;
  if (event.key === "/") return does(() => document.getElementById("input")?.focus());
  if (event.key === "?") return does(() => { panels.keys.value = true; });
  return undefined;
}

