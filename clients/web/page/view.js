/**
 * The parts of the chat page as DOM nodes: turns, cards, the tree. What a click does is passed in.
 *
 * Text of users and models becomes text nodes only (see markdown.js). No state and no protocol here.
 */

import { Markdown } from "./markdown.js";

/** @param {string} tag @param {object} fields properties; `class`, `on` and `data` are special */
export function make(tag, { class: name, on = {}, data = {}, ...fields } = {}, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  Object.assign(element, fields);
  Object.assign(element.dataset, data);
  for (const [event, action] of Object.entries(on)) element.addEventListener(event, action);
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function button(label, action, name = "") {
  return make("button", { type: "button", class: name, on: { click: action } }, label);
}

/** Make `nodes` the children of `container`; those that stay are not touched, so focus stays too. */
export function arrange(container, nodes) {
  nodes.forEach((node, i) => {
    if (container.children[i] !== node) container.insertBefore(node, container.children[i] ?? null);
  });
  while (container.children.length > nodes.length) container.lastChild.remove();
}

/** A user's turn. `edit(text, apart)`: send it again, in place or (`apart`) on a new branch. */
export function userTurn(turn, { edit }) {
  const bubble = make("div", { class: "bubble" }, turn.text);
  const under = make("div", { class: "under" }, button("Edit", open));
  const parts = [...(turn.system ? [make("div", { class: "system" }, turn.system)] : []), bubble, under];
  const node = make("article", { class: "turn user", ariaLabel: "You" }, ...parts);

  function open() {
    const area = make("textarea", { value: turn.text, rows: Math.min(10, turn.text.split("\n").length + 1), ariaLabel: "Edit your message" });
    const close = () => { node.replaceChildren(...parts); under.querySelector("button").focus(); };
    const submit = (apart) => { if (area.value.trim()) { close(); edit(area.value.trim(), apart); } };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(false); }
    });
    node.replaceChildren(make("form", { on: { submit: (event) => { event.preventDefault(); submit(false); } } }, area,
      make("div", { class: "buttons" },
        button("Cancel", close),
        button("Send on a new branch", () => submit(true)),
        make("button", { type: "submit", class: "primary" }, "Send"))));
    area.focus();
  }
  return node;
}

/** An answer that is complete. Actions: retry, goOn, branch. */
export function answerTurn(turn, { retry, goOn, branch }) {
  const open = ["length", "cancelled", "deadline"].includes(turn.reason);
  return make("article", { class: "turn", ariaLabel: "Answer" }, answerText(turn),
    turn.message ? make("p", { class: "failed" }, turn.message) : null,
    make("div", { class: "under" },
      make("span", { class: "stats" }, stats(turn)),
      navigator.clipboard ? button("Copy", () => navigator.clipboard.writeText(turn.text)) : null,
      button("Branch from here", branch),
      button("Retry", retry, "last-only"),
      open ? button("Continue", goOn, "last-only") : null));
}

/** One of several answers to choose from. */
export function card({ title, turn, choose }) {
  return make("section", { class: "card", ariaLabel: title }, make("h3", {}, title),
    turn ? answerText(turn) : make("p", { class: "empty" }, "No answer"),
    make("div", { class: "under" },
      make("span", { class: "stats" }, turn ? stats(turn) : ""),
      button("Continue with this", choose, "choose")));
}

function answerText(turn) {
  const text = make("div", { class: "text" });
  if (turn.text.trim()) new Markdown(text).show(turn.text);
  else text.append(make("p", { class: "empty" }, "No text"));
  return text;
}

/** An answer that is being written. */
export class LiveAnswer {
  constructor(generation) {
    this.generation = generation;
    this.base = undefined; // the branch's position before it; not known at once
    this.text = make("div", { class: "text" });
    this.markdown = new Markdown(this.text);
    this.stats = make("span", { class: "stats" });
    this.body = make("div", { class: "live", ariaBusy: "true" }, this.text, make("div", { class: "under" }, this.stats));
    this.turn = make("article", { class: "turn", ariaLabel: "Answer" });
    this.section = make("section", { class: "card" });
  }

  /** As a turn of the branch shown. */
  asTurn() {
    this.turn.replaceChildren(this.body);
    return this.turn;
  }

  /** As one of several answers. */
  asCard(title) {
    this.section.replaceChildren(make("h3", {}, title), this.body);
    this.section.ariaLabel = title;
    return this.section;
  }

  startsAt(position) {
    this.base = position;
  }

  /** The text so far; `position`: the branch's length now. */
  show(text, position, now = performance.now()) {
    this.markdown.show(text);
    this.first ??= { position, now };
    const seconds = (now - this.first.now) / 1000;
    const parts = this.base === undefined ? [] : [`${position - this.base} tokens`];
    if (seconds > 0.3) parts.push(`${Math.round((position - this.first.position) / seconds)} tok/s`);
    this.stats.textContent = parts.join(" · ");
  }
}

/** Tokens, speed, time to the first token, tokens that were forced or guessed right, prompt tokens that were cached, how it ended. */
export function stats({ usage, reason }) {
  const parts = [];
  if (usage) {
    const seconds = (usage.total_ms - (usage.ttft_ms ?? 0)) / 1000;
    parts.push(usage.output === 1 ? "1 token" : `${usage.output} tokens`);
    if (usage.output > 1 && seconds > 0) parts.push(`${Math.round((usage.output - 1) / seconds)} tok/s`);
    if (usage.ttft_ms != null) parts.push(`first after ${Math.round(usage.ttft_ms)} ms`);
    if (usage.forced) parts.push(`${usage.forced} forced`); // under a constraint nothing else is guessed
    else if (usage.accepted) parts.push(`${usage.accepted} guessed`);
    parts.push(`prompt ${usage.prompt}, ${usage.cached} cached`);
  }
  const ends = { length: "token limit", cancelled: "stopped", deadline: "out of time", error: "failed", interrupted: "interrupted" };
  if (ends[reason]) parts.push(ends[reason]);
  return parts.join(" · ");
}

/** Where the branch shown left the one it comes from. */
export function divider(label, action) {
  return make("div", { class: "divider" }, button(label, action));
}

/**
 * The branches as nested lists.
 * @param {import("./conversation.js").Conversation} conversation
 * @param {{current: string, busy: (name: string) => boolean, pick: (name: string) => void, drop: (name: string) => void}} how
 */
export function tree(conversation, { current, busy, pick, drop }) {
  const only = conversation.branches.size === 1;
  const item = (branch) => {
    const { name } = branch;
    const label = conversation.label(branch);
    const choose = make("button", { type: "button", class: `pick${busy(name) ? " busy" : ""}`, title: label, on: { click: () => pick(name) } },
      make("span", {}, label));
    if (name === current) choose.setAttribute("aria-current", "true");
    const children = conversation.children(name);
    return make("li", {},
      make("div", { class: name === current ? "current" : "" }, choose,
        only ? null : make("button", { type: "button", class: "icon drop", ariaLabel: `Delete the branch ${label}`, on: { click: () => drop(name) } }, "×")),
      children.length ? make("ul", {}, ...children.map(item)) : null);
  };
  return make("ul", {}, ...conversation.roots().map(item));
}
