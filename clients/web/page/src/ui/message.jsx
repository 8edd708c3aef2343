/** One message of the conversation, and what can be done with it. */

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { options } from "../model/settings.js";
import { copied } from "../render/clipboard.js";
import { Icon, IconButton } from "./icons.jsx";
import { Menu } from "./menu.jsx";
import { AnswerText } from "./text.jsx";

const CUT = ["length", "cancelled", "deadline", "interrupted"];

export function UserMessage({ chat, message, last }) {
  chat.version.value; // read, to be told of changes
  const [editing, setEditing] = useState(false);
  if (editing) {
    return <EditForm message={message} cancel={() => setEditing(false)} send={(text) => { setEditing(false); chat.edit(message, text, { options: options(chat) }); }} />;
  }
  return (
    <article class="message user" aria-label="You">
      {message.system && <details class="system"><summary>System prompt</summary><p dir="auto">{message.system}</p></details>}
      {message.merged ? <Merged message={message} /> : message.text && <div class="bubble" dir="auto">{message.text}</div>}
      {message.files?.map(({ name, text }) => <FileChip key={name} name={name} text={text} />)}
      <div class="under">
        <Arrows chat={chat} message={message} />
        <CopyButton text={message.text} />
        {!message.merged && !chat.watching && <IconButton name="edit" label="Edit: makes another branch, this one stays" onClick={() => setEditing(true)} />}
        {last && !chat.watching && <button type="button" class="small" onClick={() => { chat.open(); chat.answer(message, { options: options(chat) }); }}>Get an answer</button>}
      </div>
    </article>
  );
}

function Merged({ message }) {
  return (
    <details class="bubble merged">
      <summary>{message.merged.length || "Several"} drafts, brought together</summary>
      <p dir="auto">{message.text}</p>
    </details>
  );
}

function FileChip({ name, text }) {
  return (
    <details class="file">
      <summary><Icon name="file" />{name} <small>{text.length.toLocaleString()} characters</small></summary>
      <pre tabIndex={0}>{text.slice(0, 20_000)}{text.length > 20_000 ? "\n…" : ""}</pre>
    </details>
  );
}

function EditForm({ message, cancel, send, label = "Edit your message", action = "Send" }) {
  const area = useRef(null);
  useLayoutEffect(() => { area.current.focus(); area.current.setSelectionRange(-1, -1); }, []);
  const submit = () => { const text = area.current.value.trim(); if (text) send(text); };
  const keys = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); cancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  };
  return (
    <form class="edit" onSubmit={(event) => { event.preventDefault(); submit(); }}>
      <textarea ref={area} defaultValue={message.text} dir="auto" aria-label={label} rows={Math.min(12, message.text.split("\n").length + 1)} onKeyDown={keys} />
      <div class="buttons"><span class="soft">What followed stays, behind the arrows.</span>
        <button type="button" onClick={cancel}>Cancel</button><button type="submit" class="primary">{action}</button></div>
    </form>
  );
}

export function AnswerMessage({ chat, message, last }) {
  chat.version.value; // read, to be told of changes
  const [editing, setEditing] = useState(false);
  const live = chat.live.get(message.id);
  if (editing) {
    return <EditForm message={message} label="Edit this answer" action="Keep as my version" cancel={() => setEditing(false)} send={(text) => { setEditing(false); chat.open(); chat.correct(message, text); }} />;
  }
  return (
    <article class="message" aria-label="Answer">
      <AnswerText chat={chat} message={message} correct={chat.watching ? undefined : (text) => chat.correct(message, text)} />
      {message.calls?.map((call, i) => <Call key={i} call={call} />)}
      {message.calls?.length > 0 && last && !live && !chat.watching && <ResultForm chat={chat} message={message} />}
      {message.state === "failed" && <p class="failed" role="alert">No answer: {message.error}</p>}
      <div class="under">
        {!live && <Arrows chat={chat} message={message} />}
        {!live && <CopyButton text={message.text} />}
        {!live && !chat.watching && <IconButton name="retry" label="Retry: another answer beside this one" onClick={() => { chat.open(); chat.retry(message, { options: options(chat) }); }} />}
        {!live && last && !chat.watching && CUT.includes(message.reason) && message.text && (
          <IconButton name="go" label="Go on writing" onClick={() => { chat.open(); chat.goOn(message, { options: options(chat) }); }} />
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
    <Menu label="More" items={[
      message.json || message.calls?.length ? null : ["Edit this answer", edit],
      ["Retry with the likeliest words", () => otherwise(0)],
      ["Retry with more surprising words", () => otherwise(1.3)],
      ["Explore 3 drafts beside this", () => explore(3)],
      ["Explore 7 drafts beside this", () => explore(7)],
      siblings.length > 1 ? [`Compare all ${siblings.length} side by side`, () => chat.compare(question, true)] : null,
      ["Delete this branch", () => discard(chat, message), "bad"],
    ]} />
  );
}

/** Hide a branch, with a way back. */
export function discard(chat, message) {
  chat.hide(message);
  chat.notice.value = { mild: true, text: "The branch was deleted.", action: ["Undo", () => { chat.hide(message, false); chat.choose(message); }] };
}

/** < 2/3 >: the siblings of a message. */
export function Arrows({ chat, message }) {
  chat.version.value; // read, to be told of changes
  const all = chat.tree.siblings(message);
  if (all.length < 2) return null;
  const at = all.indexOf(message);
  const to = (step) => chat.choose(all[(at + step + all.length) % all.length]);
  return (
    <span class="arrows" role="group" aria-label={`Version ${at + 1} of ${all.length}`}
      onKeyDown={(event) => { const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key]; if (step) { event.preventDefault(); to(step); } }}>
      <IconButton name="left" label="Earlier version" onClick={() => to(-1)} />
      <span>{at + 1}/{all.length}</span>
      <IconButton name="right" label="Later version" onClick={() => to(1)} />
    </span>
  );
}

export function CopyButton({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    setDone(await copied(text));
    setTimeout(() => setDone(false), 1500);
  };
  return <IconButton name={done ? "check" : "copy"} label={done ? "Copied" : "Copy"} onClick={copy} />;
}

/** A tool call. */
function Call({ call: { name, arguments: args } }) {
  return (
    <section class="card call" aria-label={`Call of ${name}`}>
      <h3>Calls <code>{name}</code></h3>
      <pre tabIndex={0}>{pretty(args)}</pre>
    </section>
  );
}

/** A person answers for the tools. */
function ResultForm({ chat, message }) {
  const fields = useRef([]);
  const submit = (event) => {
    event.preventDefault();
    chat.open();
    chat.tell(message.calls.map(({ id, name }, i) => ({ ...(id && { id }), name, text: fields.current[i].value })), message, { options: options(chat) });
  };
  return (
    <form class="card results" onSubmit={submit}>
      {message.calls.map(({ name }, i) => (
        <label key={i}>Result of <code>{name}</code><textarea rows={2} ref={(each) => { fields.current[i] = each; }} /></label>
      ))}
      <div class="buttons"><button type="submit" class="primary">Send the results</button></div>
    </form>
  );
}

export function ToolMessage({ message }) {
  return (
    <article class="message" aria-label="Results of tools">
      {message.results.map(({ name, text }, i) => (
        <section class="card result" key={i} aria-label={`Result of ${name}`}><h3><code>{name}</code> gave</h3><pre tabIndex={0}>{pretty(text)}</pre></section>
      ))}
    </article>
  );
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/** Tokens, speed, and what of the prompt had to be computed. */
export function Stats({ chat, message }) {
  chat.version.value; // read, to be told of changes
  const live = chat.live.get(message.id);
  live?.drawn.value;
  if (live) {
    const { tokens, rate } = live;
    return tokens ? <span class="stats">{tokens} tokens{rate ? ` · ${Math.round(rate)} tok/s` : ""}</span> : null;
  }
  const text = [statsOf(message), savedOf(chat.tree, message)].filter(Boolean).join(" · ");
  return text && <span class="stats" title={costOf(message)}>{text}</span>;
}

const ENDS = { length: "token limit", cancelled: "stopped", deadline: "out of time", error: "failed", interrupted: "interrupted" };

/** @param {object} message  an answer */
export function statsOf({ usage, reason, corrected, outage }) {
  const parts = [];
  if (usage) {
    const seconds = (usage.total_ms - (usage.ttft_ms ?? 0)) / 1000;
    parts.push(usage.output === 1 ? "1 token" : `${usage.output} tokens`);
    if (outage) parts.push("went on after a restart of the server");
    else if (usage.output > 1 && seconds > 0) parts.push(`${Math.round((usage.output - 1) / seconds)} tok/s`);
    if (usage.ttft_ms != null) parts.push(`first after ${Math.round(usage.ttft_ms)} ms`);
    parts.push(`${usage.cached} of ${usage.prompt} cached`);
  }
  if (ENDS[reason]) parts.push(ENDS[reason]);
  if (corrected) parts.push("corrected by you");
  return parts.join(" · ");
}

const LEAST = 16; // computed tokens that tell how long one takes

/** What typing ahead saved before the first token, by what computing a prompt took elsewhere in this chat. */
function savedOf(tree, { parent, usage }) {
  const ahead = usage && tree.get(parent)?.ahead;
  if (!ahead) return "";
  const computed = [...tree.messages.values()].filter((each) => each.usage?.computed >= LEAST && !tree.get(each.parent)?.ahead && each.usage.ttft_ms != null);
  const rates = computed.map((each) => Math.max(0, each.usage.ttft_ms - (each.usage.queue_ms ?? 0)) / each.usage.computed).sort((a, b) => a - b);
  const saved = rates.length ? ` (about ${Math.round(rates[rates.length >> 1] * ahead)} ms saved)` : "";
  return `${ahead} tokens were computed while you typed${saved}`;
}

/** What an answer cost, in words. */
export function costOf({ usage }) {
  if (!usage) return "";
  const { prompt, cached, computed, output, forced = 0, accepted = 0 } = usage;
  const parts = [`prompt: ${prompt} tokens, ${cached} found in the cache, ${computed} computed`, `output: ${output} tokens`];
  if (forced) parts.push(`${forced} of them had no choice (forced)`);
  if (accepted) parts.push(`${accepted} were guessed right (accepted)`);
  return parts.join("\n");
}
