/** The whole chat as a tree: every edit, retry and draft, what each cost, and the way to it. */

import { useEffect, useRef, useState } from "preact/hooks";
import { panels } from "../model/app.js";
import { brief } from "../model/tree.js";
import { number, t } from "../strings.js";
import { IconButton } from "./icons.jsx";
import { costOf, discard } from "./message.jsx";

const MOST_DEPTH = 12; // that is drawn further to the right
const BLOCK = 64; // tokens: an end that is shorter is computed in no time, and never leaves the KV cache by itself

export function TreePanel({ chat }) {
  chat.version.value; // read, to be told of changes
  const path = new Set(chat.tree.path().map(({ id }) => id));
  const all = rows(chat.tree, (message) => !isStub(chat, message));
  const end = chat.tree.path().at(-1)?.id;
  const held = useHeld(chat);
  const [focus, setFocus] = useState(end);
  const list = useRef(null);
  const at = all.some(({ message }) => message.id === focus) ? focus : end;
  useEffect(() => { list.current?.querySelector(".current")?.scrollIntoView({ block: "center" }); }, []); // where one is
  useEffect(() => {
    if (list.current?.contains(document.activeElement)) list.current.querySelector(`[data-id="${at}"]`)?.focus();
  }, [at]);
  const keys = (event) => {
    const i = all.findIndex(({ message }) => message.id === at);
    const { message } = all[i] ?? {};
    if (!message) return;
    const to = {
      ArrowDown: all[i + 1]?.message, ArrowUp: all[i - 1]?.message, ArrowLeft: chat.tree.parent(message),
      ArrowRight: chat.tree.children(message)[0], Home: all[0].message, End: all.at(-1).message,
    }[event.key];
    if (to) setFocus(to.id);
    else if (event.key === "Enter" || event.key === " ") chat.choose(message);
    else if (event.key === "Delete" && !chat.watching) discard(chat, message);
    else return;
    event.preventDefault();
  };
  return (
    <aside class="tree-panel" aria-label={t.treeOfChat}>
      <div class="tree-head"><h2>{t.tree}</h2><span class="space" /><IconButton name="close" label={t.closeTree} onClick={() => { panels.tree.value = false; }} /></div>
      <Totals chat={chat} />
      <Kept chat={chat} held={held} />
      {all.length === 0 ? <p class="soft">{t.treeEmpty}</p> : (
        <ul role="tree" ref={list} aria-label={t.messages} onKeyDown={keys}>
          {all.map(({ message, ...row }) => (
            <Row key={message.id} {...row} {...{ chat, message }} shown={path.has(message.id)} current={message.id === end} focusable={message.id === at} tier={row.end ? tierOf(held, message) : undefined}
              pick={() => { setFocus(message.id); chat.choose(message); }} />
          ))}
        </ul>
      )}
      <Legend />
    </aside>
  );
}

/**
 * Messages in the order of the tree. A chain stays at its depth; where it forks, its branches go one deeper. `rails`: the
 * depths whose edges run past a row, on their way to a later branch; `end`: nothing hangs on it.
 */
function rows(tree, shown) {
  const found = [];
  const todo = tree.children(null).filter(shown).map((message) => ({ message, depth: 0, root: true, rails: [] })).reverse();
  while (todo.length) {
    const row = todo.pop();
    const children = tree.children(row.message).filter(shown);
    const forks = children.length > 1;
    found.push({ ...row, forks, end: !children.length });
    const inner = children.map((message, i) => ({
      message, depth: row.depth + (forks ? 1 : 0), first: forks, rails: forks && i < children.length - 1 ? [...row.rails, row.depth] : row.rails,
    }));
    todo.push(...inner.reverse());
  }
  return found;
}

/** An answer that came to nothing: no word, nothing behind it, no error to tell. */
function isStub(chat, message) {
  const { role, text, calls, state } = message;
  return role === "assistant" && !text && !calls?.length && state !== "failed" && !chat.live.has(message.id) && !chat.tree.children(message).length;
}

function Row({ chat, message, depth, rails, first, root, end, forks, shown, current, focusable, tier, pick }) {
  chat.version.value; // read, to be told of changes
  const live = chat.live.get(message.id);
  live?.drawn.value;
  const text = textOf(message, live) || (live ? "…" : t.noTextShort);
  const who = { user: t.you, assistant: t.answer, tool: t.tools }[message.role];
  return (
    <li role="treeitem" data-id={message.id} tabIndex={focusable ? 0 : -1} aria-level={depth + 1} aria-selected={current}
      class={`${message.role}${shown ? " shown" : ""}${current ? " current" : ""}${first ? " first" : ""}${root ? " root" : ""}${end ? " end" : ""}${forks ? " forks" : ""}${live ? " live" : ""}`}
      style={{ "--depth": Math.min(depth, MOST_DEPTH) }} onClick={pick}>
      {rails.filter((at) => at < MOST_DEPTH).map((at) => <i key={at} class="rail" aria-hidden="true" style={{ "--at": at }} />)}
      <span class="knot" aria-hidden="true" /><span class="unseen">{who}: </span>
      <span class="row-text" dir="auto">{text}</span>
      {tier && !live && <i class={`tier ${tier}`} title={t[TIERS[tier]]} />}
      {tier && !live && <span class="unseen">{t[TIERS[tier]]}</span>}
      <Cost live={live} message={message} />
    </li>
  );
}

/** A message in one line; its calls, where it makes some. */
function textOf({ text, files, calls }, live) {
  if (calls?.length) return `${t.callsTool} ${calls.map(({ name }) => name).join(", ")}`;
  return brief(live ? live.text : text || files?.[0]?.name || "", 90);
}

/** What an answer cost: the tokens of its prompt that were cached and computed, and those it wrote. */
function Cost({ live, message }) {
  if (live) return <span class="cost">{live.tokens}{live.rate ? ` · ${t.perSecondShort(Math.round(live.rate))}` : ""}</span>;
  const { usage, score } = message;
  if (!usage) return null;
  const forced = usage.forced ?? 0;
  const accepted = usage.accepted ?? 0;
  const sampled = Math.max(0, usage.output - forced - accepted);
  return (
    <span class="cost" title={costOf(message)}>
      {score != null && <b>{score}/9 </b>}{usage.output}
      <span class="bar-of" aria-hidden="true">
        {[["cached", usage.cached], ["computed", usage.computed], ["forced", forced], ["accepted", accepted], ["sampled", sampled]].map(([kind, amount]) =>
          amount > 0 && <i key={kind} class={kind} style={{ flexGrow: amount }} />)}
      </span>
    </span>
  );
}

function Totals({ chat }) {
  chat.version.value; // read, to be told of changes
  const { tree } = chat;
  const sums = { cached: 0, computed: 0, output: 0 };
  let ends = 0;
  for (const each of tree.messages.values()) {
    if (each.gone) continue;
    if (!tree.children(each).length) ends += 1;
    for (const name of Object.keys(sums)) sums[name] += each.usage?.[name] ?? 0;
  }
  if (!tree.size) return null;
  const total = sums.cached + sums.computed;
  return (
    <p class="totals">
      {t.totals(ends, sums.output)}
      {total > 0 && ` · ${t.totalsCached(number(Math.round((100 * sums.cached) / total)))}`}
    </p>
  );
}

/** What the server has of each branch, by name. It is asked when the panel opens and when an answer has ended. */
function useHeld(chat) {
  const [held, setHeld] = useState(null);
  const { session, busy } = chat;
  const open = chat.status.value.status === "open";
  useEffect(() => {
    if (!open || busy) return undefined;
    let wanted = true;
    session.tree().then(({ branches }) => { if (wanted) setHeld(new Map(branches.map((each) => [each.branch, each]))); }, () => {}); // it shows what it knows
    return () => { wanted = false; };
  }, [session, open, busy]);
  return open ? held : null;
}

/** Where the KV up to the end of a message is: "gpu", "host", "disk" or "none"; undefined where that is not known. */
function tierOf(held, { place }) {
  const branch = held?.get(place?.branch);
  if (!branch || branch.resident === undefined || place.at === undefined) return undefined;
  if (place.at <= branch.resident + BLOCK) return "gpu";
  return branch.kv === "gpu" ? "none" : branch.kv;
}

/** What the server has of the chat, and for how long. */
function Kept({ chat, held }) {
  chat.version.value; // read, to be told of changes
  const { ttl_s: ttl, persist } = chat.session?.state ?? {};
  if (!held) return null;
  const tokens = resident([...held.values()]);
  return <p class="soft kept">{[t.keptTokens(number(tokens), tokens > 0 && held.size > 1), ttl && t.keptFor(ttl), persist && persist !== "none" ? t.keptSaved : t.keptUnsaved].filter(Boolean).join(" · ")}</p>;
}

/** Tokens with KV, at most: those that a fork shares with its parent count once, but not equal beginnings of others. */
function resident(branches) {
  const names = new Set(branches.map(({ branch }) => branch));
  return branches.reduce((sum, { resident = 0, parent, at = 0 }) => sum + Math.max(0, resident - (names.has(parent) ? at : 0)), 0);
}

/** Names of strings. */
const KINDS = { cached: "kindCached", computed: "kindComputed", sampled: "kindSampled", forced: "kindForced", accepted: "kindAccepted" };

const TIERS = { gpu: "tierGpu", host: "tierHost", disk: "tierDisk", none: "tierNone" };

function Legend() {
  return (
    <p class="legend" aria-hidden="true">
      {Object.entries(TIERS).map(([tier, name]) => <span key={tier}><i class={`tier ${tier}`} />{t[name]}</span>)}
      {Object.entries(KINDS).map(([kind, name]) => <span key={kind}><i class={kind} />{t[name]}</span>)}
    </p>
  );
}
