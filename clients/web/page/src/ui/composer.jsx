/** Where messages are written: text, files, how many answers, and their format. */

import { useEffect, useRef, useState } from "preact/hooks";
import { panels, server, toast } from "../model/app.js";
import { MOST_PICTURES, pictureOf, urlOf } from "../model/pictures.js";
import { options, schemaOf, settings, settingsOf, thinking } from "../model/settings.js";
import { contentOf, picturesOf } from "../model/tree.js";
import { number, t } from "../strings.js";
import { Icon, IconButton } from "./icons.jsx";

const MOST_FILE = 512 << 10; // bytes of an attached file
const MOST_FILES = 16;
const CHARACTERS_A_TOKEN = 4; // a guess, until the server has counted
const AHEAD_MS = 350; // after the last key
const COUNTS = [1, 2, 3, 4, 6, 8];

export function Composer({ chat }) {
  chat.version.value; // read, to be told of changes
  const [text, setText] = useState(chat.record.draft ?? "");
  const [files, setFiles] = useState([]);
  const [over, setOver] = useState(false);
  const area = useRef(null);
  const picker = useRef(null);
  const camera = useRef(null);
  const sees = Boolean(server.value?.model?.pictures);
  const { count, format } = settingsOf(chat);
  const writing = chat.tree.path().some(({ id }) => chat.live.has(id)) || chat.tree.drafts(chat.tree.path().findLast(({ role }) => role === "user")).some(({ id }) => chat.live.has(id));
  const schema = schemaOf(format);
  const size = sizeOf(chat, contentOf({ text, files }));

  useEffect(() => { area.current.focus({ preventScroll: true }); grow(area.current); }, []);
  useEffect(() => { grow(area.current); }, [text]);
  const ahead = settings.value.ahead;
  useEffect(() => {
    if (!ahead) return undefined;
    const timer = setTimeout(() => chat.typeAhead({ text: text.trim(), files, system: settings.value.system.trim() }), AHEAD_MS);
    return () => clearTimeout(timer);
  }, [text, files, ahead, chat.typed.value, chat.status.value]);

  const typed = (value) => {
    setText(value);
    chat.keepDraft(value);
    if (value) chat.open();
  };
  const submit = (event) => {
    event?.preventDefault();
    const said = text.trim();
    if ((!said && !files.length) || writing || size.full) return;
    if (schema.error) { panels.format.value = true; return; }
    chat.open();
    chat.notice.value = null;
    const system = chat.tree.size ? undefined : settings.value.system.trim();
    const question = chat.tree.path().findLast(({ role }) => role === "user");
    if (question?.compare) chat.compare(question, false);
    chat.send({ text: said, files, system, count, options: options(chat) });
    setText("");
    setFiles([]);
    chat.keepDraft("");
  };
  const attach = async (list) => {
    const added = [];
    let pictures = picturesOf({ files }).length;
    for (const file of list) {
      if (files.length + added.length >= MOST_FILES) { toast.value = { text: t.mostFiles(MOST_FILES) }; break; }
      if (file.type.startsWith("image/")) {
        if (!sees) { toast.value = { text: t.seesNoPictures(file.name) }; continue; }
        if (pictures >= MOST_PICTURES) { toast.value = { text: t.mostPictures(MOST_PICTURES) }; continue; }
        const picture = await pictureOf(file, chat.limits?.frame_bytes).catch(() => null);
        if (!picture) { toast.value = { text: t.noPicture(file.name) }; continue; }
        added.push(picture);
        pictures += 1;
        continue;
      }
      if (file.size > MOST_FILE) { toast.value = { text: t.attachmentTooBig(file.name, Math.round(file.size / 1024), MOST_FILE >> 10) }; continue; }
      const body = await file.text();
      if (body.includes("\u0000") || body.includes("\ufffd")) { toast.value = { text: t.noTextFile(file.name) }; continue; }
      added.push({ name: file.name, text: body });
    }
    if (added.length) { setFiles((now) => [...now, ...added]); chat.open(); }
    area.current.focus();
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "ArrowUp" && !text) {
      const last = [...document.querySelectorAll(".message.user")].at(-1)?.querySelector("button.edits");
      if (last) { event.preventDefault(); last.click(); }
    }
  };
  return (
    <form class={`composer${over ? " over" : ""}`} onSubmit={submit}
      onDragOver={(event) => { if (event.dataTransfer.types.includes("Files")) { event.preventDefault(); setOver(true); } }}
      onDragLeave={() => setOver(false)} onDrop={(event) => { event.preventDefault(); setOver(false); attach(event.dataTransfer.files); }}>
      {files.length > 0 && (
        <ul class="attached" aria-label={t.attached}>
          {files.map((file, i) => (
            <li key={i} class={file.picture ? "shown" : ""}>{file.picture ? <img src={urlOf(file)} alt={t.pictureNamed(file.name)} /> : <Icon name="file" />}<span>{file.name}</span><IconButton name="close" label={t.removeFile(file.name)} onClick={() => setFiles(files.filter((each) => each !== file))} /></li>
          ))}
        </ul>
      )}
      <label class="unseen" for="input">{t.message}</label>
      <textarea id="input" ref={area} rows={1} dir="auto" value={text} placeholder={t.sendAMessage} autocomplete="off" enterKeyHint="send"
        onInput={(event) => typed(event.target.value)} onKeyDown={keys} onPaste={(event) => { if (event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); } }} />
      <div class="tools">
        <IconButton name="attach" label={sees ? t.attachAny : t.attach} onClick={() => picker.current.click()} />
        {sees && <IconButton name="camera" label={t.takePicture} onClick={() => camera.current.click()} />}
        {sees && <input type="file" ref={camera} accept="image/png,image/jpeg,image/webp,image/gif" capture="environment" hidden aria-label={t.takePicture} onChange={(event) => { attach([...event.target.files]); event.target.value = ""; }} />}
        <input type="file" ref={picker} multiple hidden aria-label={t.filesToAttach} onChange={(event) => { attach([...event.target.files]); event.target.value = ""; }} />
        <label class="count" title={t.howManyDrafts}><Icon name="columns" /><span class="unseen">{t.draftsSideBySide}</span>
          <select id="count" value={count} onChange={(event) => chat.set({ count: Number(event.target.value) })}>
            {COUNTS.map((each) => <option key={each} value={each}>{each === 1 ? t.oneAnswer : t.someDrafts(each)}</option>)}
          </select>
        </label>
        <Effort chat={chat} />
        <button type="button" class={`quiet format${format.trim() ? " on" : ""}`} aria-label={format.trim() ? t.answerFormatSet : t.answerFormat} title={t.answerFormat} onClick={() => { panels.format.value = true; }}>
          <Icon name="braces" />{format.trim() && <span>{t.json}{schema.schema?.title ? `: ${schema.schema.title}` : ""}</span>}</button>
        <Tools chat={chat} />
        <Counter size={size} />
        {writing
          ? <button type="button" class="primary round" aria-label={t.stop} title={t.stopHint} onClick={() => chat.stop()}><Icon name="stop" /></button>
          : <button type="submit" class="primary round" aria-label={t.send} title={t.sendHint} disabled={(!text.trim() && !files.length) || size.full}><Icon name="send" /></button>}
      </div>
    </form>
  );
}

/** The MCP servers whose tools this chat has. */
function Tools({ chat }) {
  chat.version.value; // read, to be told of changes
  const tools = Object.values(chat.record.mcp ?? {});
  if (!tools.length) return null;
  const words = t.toolsOfServers(tools.length, [...new Set(tools.map((each) => each.server))].join(", "));
  return <button type="button" class="quiet format with-tools on" aria-label={words} title={words} onClick={() => { panels.settings.value = true; }}><Icon name="tool" /><span>{t.countOfTools(tools.length)}</span></button>;
}

/** Names of strings. */
const EFFORTS = { none: "thinkNone", low: "thinkLow", medium: "thinkMedium", high: "thinkHigh" };

/** How much the model thinks, where it can be asked. What its chat template is told stands at the head of a chat. */
function Effort({ chat }) {
  chat.version.value; // read, to be told of changes
  const { told, efforts } = thinking();
  const known = Object.keys(EFFORTS).filter((name) => efforts[name]);
  if (!known.length) return null;
  return (
    <label class="count" title={t.howMuchToThink}><Icon name="thought" /><span class="unseen">{t.thinking}</span>
      <select id="effort" value={settingsOf(chat).effort} disabled={told && chat.tree.size > 0} onChange={(event) => chat.set({ effort: event.target.value })}>
        <option value="">{t.thinkDefault}</option>
        {known.map((name) => <option key={name} value={name}>{t[EFFORTS[name]]}</option>)}
      </select>
    </label>
  );
}

/** Tokens of the chat so far and about those of what is typed, beside what the model can hold. */
function sizeOf(chat, text) {
  const context = server.value?.model?.context;
  const last = chat.tree.path().findLast(({ place, usage }) => place?.at || usage);
  const used = last?.place?.at ?? (last ? last.usage.prompt + last.usage.output : 0);
  const typed = text.trim() && chat.typed.value;
  const more = typed ? typed.tokens : Math.ceil(text.length / CHARACTERS_A_TOKEN);
  return { context, used, typed, more, near: context && used + more > 0.9 * context, full: Boolean(context) && used >= context };
}

function Counter({ size: { context, used, typed, more, near, full } }) {
  if (!used && !more) return <span class="counter" />;
  if (full) return <span class="counter full" role="status">{t.contextFull}</span>;
  return (
    <span class={`counter${near ? " full" : ""}`} title={[t.sizeOfBranch(used), more && (typed ? t.sizeAhead(more) : t.sizeTyped(more)), context && t.sizeOfContext(context)].filter(Boolean).join("")}>
      {number(used)}{more ? ` + ${typed ? "" : "~"}${number(more)}` : ""}{context ? ` / ${number(context)}` : ""}
    </span>
  );
}

function grow(area) {
  if (!area) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}
