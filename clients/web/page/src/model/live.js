/** An answer that is being written: its text so far, its speed, and how long it thought. */

import { signal } from "@preact/signals";
import { split } from "./tree.js";

/**
 * One animation frame for all that is drawn: answers that stream side by side are drawn together. As long as that took
 * nothing more is drawn, so that at least half of the page's time is left to its user.
 */
const waiting = new Set();
const MOST_PAUSE_MS = 250;
let asked = 0;
let free = 0; // not before this time is the next drawing

function ask() {
  const wait = free - performance.now();
  asked ||= wait > 0 ? setTimeout(() => { asked = requestAnimationFrame(draw); }, wait) : requestAnimationFrame(draw);
}

function draw(began) {
  asked = 0;
  const now = [...waiting];
  waiting.clear();
  for (const each of now) each.drawn.value += 1;
  setTimeout(() => { // behind the layout and the painting of this frame
    const end = performance.now();
    free = end + Math.min(end - began, MOST_PAUSE_MS);
  });
}

export class Live {
  #began = performance.now();
  #thought = null;
  #resolve;

  /** @param {object} message @param {import("../../../lib/index.js").Generation} generation @param {string} before text that it goes on with */
  constructor(message, generation, before = "") {
    this.message = message;
    this.generation = generation;
    this.before = before;
    this.text = before;
    this.position = undefined;
    this.first = null; // position and time of the first text
    this.thoughtMs = 0;
    /** Read it to be told when there is more to draw. */ this.drawn = signal(0);
    this.ended = new Promise((resolve) => { this.#resolve = resolve; });
  }

  /** @param {import("../../../lib/stream.js").TextDelta} delta */
  add({ text, cut, position }) {
    this.text = (cut ? this.text.slice(0, this.text.length - cut) : this.text) + text;
    this.position = position;
    this.first ??= { position, at: performance.now() };
    if (this.#thought !== false) this.#think();
    waiting.add(this);
    ask();
  }

  /** Tokens of it so far, as far as the position tells. */
  get tokens() { return this.first ? this.position - this.first.position + 1 : 0; }

  /** Tokens in a second; 0 before that can be said. */
  get rate() {
    const seconds = this.first ? (performance.now() - this.first.at) / 1000 : 0;
    return seconds > 0.3 ? (this.position - this.first.position) / seconds : 0;
  }

  get seconds() { return (performance.now() - this.#began) / 1000; }

  #think() {
    const { open, thought } = split(this.text);
    if (open) this.#thought ??= performance.now();
    else if (thought) {
      this.thoughtMs = performance.now() - (this.#thought ?? this.#began);
      this.#thought = false;
    } else if (this.text.length > 20) this.#thought = false;
  }

  close() {
    this.drawn.value += 1;
    this.#resolve();
  }
}
