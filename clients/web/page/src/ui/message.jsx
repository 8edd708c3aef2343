/** One message of the conversation, and what can be done with it. */

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { options } from "../model/settings.js";
import { copied } from "../render/clipboard.js";
import { t } from "../strings.js";
import { Calls } from "./calls.jsx";
import { Icon, IconButton } from "./icons.jsx";
import { Menu } from "./menu.jsx";
import { Pictures } from "./pictures.jsx";
import { AnswerText } from "./text.jsx";

const CUT = ["length", "cancelled", "deadline", "interrupted"];

export function UserMessage({ chat, message, last }) {
  chat.version.value; // read, to be told of changes
  const [editing, setEditing] = useState(false);
  if (editing) {
    return <EditForm message={message} cancel={() => setEditing(false)} send={(text) => { setEditing(false); chat.edit(message, text, { options: options(chat) }); }} />;
  }
  return (
    <article class="message user" aria-label={t.you}>
      {message.system && <details class="system"><summary>{t.systemPrompt}</summary><p dir="auto">{message.system}</p></details>}
      {message.merged ? <Merged message={message} /> : message.text && <div class="bubble" dir="auto">{message.text}</div>}
      <Pictures files={message.files} />
      {message.files?.filter(({ picture }) => !picture).map(({ name, text }) => <FileChip key={name} name={name} text={text} />)}
      <div class="under">
        <Arrows chat={chat} message={message} />
        <CopyButton text={message.text} />
        {!message.merged && !chat.watching && <IconButton name="edit" class="edits" label={t.editHint} onClick={() => setEditing(true)} />}
        {last && !chat.watching && <button type="button" class="small" onClick={() => { chat.open(); chat.answer(message, { options: options(chat) }); }}>{t.getAnswer}</button>}
      </div>
    </article>
  );
}

function Merged({ message }) {
  return (
    <details class="bubble merged">
      <summary>{t.draftsMerged(message.merged.length)}</summary>
      <p dir="auto">{message.text}</p>
    </details>
  );
}

function FileChip({ name, text }) {
  return (
    <details class="file">
      <summary><Icon name="file" />{name} <small>{t.characters(text.length)}</small></summary>
      <pre tabIndex={0}>{text.slice(0, 20_000)}{text.length > 20_000 ? "\n…" : ""}</pre>
    </details>
  );
}

function EditForm({ message, cancel, send, label = t.editMessage, action = t.send }) {
  const area = useRef(null);
  useLayoutEffect(() => { area.current.focus(); area.current.setSelectionRange(-1, -1); }, []);
  const submit = () => { const text = area.current.value.trim(); if (text || message.files?.length) send(text); };
  const keys = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); cancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  };
  return (
    <form class="edit" onSubmit={(event) => { event.preventDefault(); submit(); }}>
      <Pictures files={message.files} />
      <textarea ref={area} defaultValue={message.text} dir="auto" aria-label={label} rows={Math.min(12, message.text.split("\n").length + 1)} onKeyDown={keys} />
      <div class="buttons"><span class="soft">{t.restStays}</span>
        <button type="button" onClick={cancel}>{t.cancel}</button><button type="submit" class="primary">{action}</button></div>
    </form>
  );
}

export function AnswerMessage({ chat, message, last }) {
  chat.version.value; // read, to be told of changes
  const [editing, setEditing] = useState(false);
  const live = chat.live.get(message.id);
  if (editing) {
    return <EditForm message={message} label={t.editAnswer} action={t.keepVersion} cancel={() => setEditing(false)} send={(text) => { setEditing(false); chat.open(); chat.correct(message, text); }} />;
  }
  return (
    <article class="message" aria-label={t.answer}>
      <AnswerText chat={chat} message={message} correct={chat.watching ? undefined : (text) => chat.correct(message, text)} />
      {message.calls?.length > 0 && <Calls chat={chat} message={message} asks={last && !live && !chat.watching} />}
      {message.state === "failed" && <p class="failed" role="alert">{t.noAnswer(message.error)}</p>}
      <div class="under">
        {!live && <Arrows chat={chat} message={message} />}
        {!live && <CopyButton text={message.text} />}
        {!live && !chat.watching && <IconButton name="retry" label={t.retryHint} onClick={() => { chat.open(); chat.retry(message, { options: options(chat) }); }} />}
        {!live && last && !chat.watching && CUT.includes(message.reason) && message.text && (
          <IconButton name="go" label={t.goOnWriting} onClick={() => { chat.open(); chat.goOn(message, { options: options(chat) }); }} />
        )}
        {!live && !chat.watching && <More chat={chat} message={message} edit={() => setEditing(true)} />}
        <Stats chat={chat} message={message} />
      </div>
    </article>
  );
}

function More({ chat, message, edit }) {
  chat.version.value; // read, to be told of changes
  const question = chat.tree.parent(message);
  const siblings = chat.tree.drafts(question);
  const explore = (count) => { chat.open(); chat.compare(question, true); chat.answer(question, { count, options: options(chat) }); };
  const otherwise = (temperature) => { chat.open(); chat.retry(message, { options: { ...options(chat), temperature } }); };
  return (
    <Menu label={t.more} items={[
      message.json || message.calls?.length ? null : [t.editAnswer, edit],
      [t.retryLikeliest, () => otherwise(0)],
      [t.retrySurprising, () => otherwise(1.3)],
      [t.exploreBeside(3), () => explore(3)],
      [t.exploreBeside(7), () => explore(7)],
      siblings.length > 1 ? [t.compareAll(siblings.length), () => chat.compare(question, true)] : null,
      [t.deleteBranch, () => discard(chat, message), "bad"],
    ]} />
  );
}

/** Hide a branch, with a way back. */
export function discard(chat, message) {
  chat.hide(message);
  chat.notice.value = { mild: true, text: t.branchDeleted, action: [t.undo, () => { chat.hide(message, false); chat.choose(message); }] };
}

/** < 2/3 >: the siblings of a message. */
export function Arrows({ chat, message }) {
  chat.version.value; // read, to be told of changes
  const all = chat.tree.siblings(message);
  if (all.length < 2) return null;
  const at = all.indexOf(message);
  const to = (step) => chat.choose(all[(at + step + all.length) % all.length]);
  return (
    <span class="arrows" role="group" aria-label={t.versionOf(at + 1, all.length)}
      onKeyDown={(event) => { const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key]; if (step) { event.preventDefault(); to(step); } }}>
      <IconButton name="left" label={t.earlierVersion} onClick={() => to(-1)} />
      <span>{at + 1}/{all.length}</span>
      <IconButton name="right" label={t.laterVersion} onClick={() => to(1)} />
    </span>
  );
}

export function CopyButton({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    setDone(await copied(text));
    setTimeout(() => setDone(false), 1500);
  };
  return <IconButton name={done ? "check" : "copy"} label={done ? t.copied : t.copy} onClick={copy} />;
}

/** Tokens, speed, and what of the prompt had to be computed. */
export function Stats({ chat, message }) {
  chat.version.value; // read, to be told of changes
  const live = chat.live.get(message.id);
  live?.drawn.value;
  if (live) {
    const { tokens, rate } = live;
    return tokens ? <span class="stats">{t.tokens(tokens)}{rate ? ` · ${t.perSecond(Math.round(rate))}` : ""}</span> : null;
  }
  const text = [statsOf(message), savedOf(chat.tree, message)].filter(Boolean).join(" · ");
  return text && <span class="stats" title={costOf(message)}>{text}</span>;
}

/** Names of strings. */
const ENDS = { length: "endLength", cancelled: "endCancelled", deadline: "endDeadline", error: "endError", interrupted: "endInterrupted" };

/** @param {object} message  an answer */
export function statsOf({ usage, reason, corrected, outage }) {
  const parts = [];
  if (usage) {
    const seconds = (usage.total_ms - (usage.ttft_ms ?? 0)) / 1000;
    parts.push(t.tokens(usage.output));
    if (outage) parts.push(t.overRestart);
    else {
      if (usage.output > 1 && seconds > 0) parts.push(t.perSecond(Math.round((usage.output - 1) / seconds)));
      if (usage.ttft_ms != null) parts.push(t.firstAfter(Math.round(usage.ttft_ms)));
    }
    parts.push(t.cachedOf(usage.cached, usage.prompt));
  }
  if (ENDS[reason]) parts.push(t[ENDS[reason]]);
  if (corrected) parts.push(t.corrected);
  return parts.join(" · ");
}

const LEAST = 16; // computed tokens that tell how long one takes

/** What typing ahead saved before the first token, by what computing a prompt took elsewhere in this chat. */
function savedOf(tree, { parent, usage }) {
  const ahead = usage && tree.get(parent)?.ahead;
  if (!ahead) return "";
  const computed = [...tree.messages.values()].filter((each) => each.usage?.computed >= LEAST && !tree.get(each.parent)?.ahead && each.usage.ttft_ms != null);
  const rates = computed.map((each) => Math.max(0, each.usage.ttft_ms - (each.usage.queue_ms ?? 0)) / each.usage.computed).sort((a, b) => a - b);
  const saved = rates.length ? t.savedTime(Math.round(rates[rates.length >> 1] * ahead)) : "";
  return `${t.computedAhead(ahead)}${saved}`;
}

/** What an answer cost, in words. */
export function costOf({ usage }) {
  if (!usage) return "";
  const { prompt, cached, computed, output, forced = 0, accepted = 0 } = usage;
  const parts = [t.costPrompt(prompt, cached, computed), t.costOutput(output)];
  if (forced) parts.push(t.costForced(forced));
  if (accepted) parts.push(t.costAccepted(accepted));
  return parts.join("\n");
}
