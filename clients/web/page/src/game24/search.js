/**
 * A tree of thought as one frame: propose steps, judge each on a fork of its own, keep the best, three levels deep.
 *
 * The program lists the steps whose sums are right; which of them goes on from its own numbers, and to 24, is the
 * model's part. The whole search is sent before the first token comes; the server forks, judges and prunes by itself.
 * What streams back grows the tree that the page draws. The same program in Python is `examples/tree_of_thought.py`.
 */

import { signal } from "@preact/signals";
import { connect } from "../../../lib/index.js";
import { Live } from "../model/live.js";

const DEPTH = 3;
const MARKS = [1, 2, 3, 4, 5, 6, 7, 8, 9].map((mark) => ` ${mark}`);
const MOST_TOKENS = 40; // of a step
const LARGEST = 200; // a step makes no larger number, nor a negative one or a fraction
const RULES = `Use two of the numbers and + - * / in each step, until 24 is left.
Numbers: 2 8 8 14
Step: 2 + 8 = 10 (left: 8 10 14)
Step: 14 - 10 = 4 (left: 4 8)
Step: 4 * 8 = 32 (left: 32)
Numbers: 4 9 10 13
Step: 13 - 10 = 3 (left: 3 4 9)
Step: 9 - 3 = 6 (left: 4 6)
Step: 4 * 6 = 24 (left: 24)
`;

const SIGNS = { "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b, "/": (a, b) => a / b };
const sorted = (numbers) => [...numbers].sort((a, b) => a - b).join(" ");

/** Each step that `numbers` (ascending) allow, and what it leaves. @returns {[string, number[]][]} */
function stepsOf(numbers) {
  const found = [];
  numbers.forEach((a, i) => numbers.forEach((b, j) => {
    if (i === j) return;
    const rest = numbers.filter((_, place) => place !== i && place !== j);
    for (const [sign, result] of Object.entries(SIGNS)) {
      const value = result(a, b);
      if (!Number.isInteger(value) || value < 0 || value > LARGEST || ("+*".includes(sign) && a > b)) continue;
      const left = [...rest, value].sort((one, other) => one - other);
      found.push([` ${a} ${sign} ${b} = ${value} (left: ${left.join(" ")})`, left]);
    }
  }));
  return found;
}

/** The steps of each level whose sums are right, of all states that the level before can leave. */
function choices(numbers) {
  let states = [[...numbers].sort((one, other) => one - other)];
  return Array.from({ length: DEPTH }, () => {
    const made = new Map(states.flatMap(stepsOf));
    states = [...new Map([...made.values()].map((left) => [left.join(), left])).values()];
    return [...made.keys()];
  });
}

/** What a step leaves of `numbers`; null if its sum or what it says is left is wrong. */
function leaves(numbers, text) {
  const [, a, sign, b, result, left] = /^(\d+) ([-+*/]) (\d+) = (\d+) \(left: ([\d ]+)\)$/.exec(text) ?? [];
  if (!left || SIGNS[sign](+a, +b) !== +result) return null;
  const rest = [...numbers];
  for (const used of [+a, +b]) {
    if (!rest.includes(used)) return null;
    rest.splice(rest.indexOf(used), 1);
  }
  const said = left.split(" ").map(Number);
  return sorted(said) === sorted([...rest, +result]) ? said : null;
}

/** A proposed step of the state that `before` leaves. `state`: writing, judged, kept, dropped or failed. */
class Thought {
  constructor(before, name, level, generation) {
    this.before = before;
    this.name = name;
    this.level = level;
    this.live = new Live(null, generation);
    this.state = "writing";
    /** @type {number | null} */ this.score = null;
    this.usage = null;
    /** @type {Thought[]} */ this.children = [];
  }

  get text() { return this.live.text.trim(); }
  /** The numbers that are left; null if a step up to here is wrong. */
  get left() { return this.before.left && leaves(this.before.left, this.text); }
  /** Whether all steps up to here are right, and 24 alone is left. */
  get solves() { return this.state !== "writing" && this.left?.join() === "24"; }
}

export class Search {
  #session;

  /** @param {string} numbers four of them @param {{width: number, keep: number, connection: {url: string, token?: Function}}} how */
  constructor(numbers, { width, keep, connection }) {
    this.numbers = numbers;
    this.left = numbers.split(" ").map(Number);
    /** Read it to be told of every change but text. */ this.version = signal(0);
    /** @type {Thought[]} */ this.roots = [];
    this.total = { output: 0, cached: 0, prompt: 0, forced: 0, accepted: 0 };
    this.status = "running";
    this.error = "";
    this.began = performance.now();
    this.seconds = 0;
    this.ops = 0;
    const { url, token } = connection;
    this.#session = connect(url, { token, retry: "never", open: { tick_ms: 30, ttl_s: 60 } });
    this.#run(width, keep);
  }

  /** Send the whole search; then watch it. */
  async #run(width, keep) {
    const session = this.#session;
    const levels = [];
    const say = (what) => { this.ops += 1; return what; };
    const watched = [say(session.append(`${RULES}Numbers: ${this.numbers}\n`))];
    let states = ["main"];
    const listed = choices(this.left);
    for (let level = 0; level < DEPTH; level += 1) {
      const children = states.map((_, place) => Array.from({ length: width }, (__, i) => `${level}.${place}.${i}`));
      children.forEach((names, place) => watched.push(say(session.fork(names, { branch: states[place] }))));
      const names = children.flat();
      const judges = names.map((name) => `${name}.judge`);
      watched.push(say(session.append("Step:", { branch: names })));
      const steps = say(session.generate({ branch: names, max_tokens: MOST_TOKENS, choices: listed[level], temperature: 0.9 }));
      names.forEach((name, i) => watched.push(say(session.fork([judges[i]], { branch: name }))));
      watched.push(say(session.append("\nChance to reach 24, from 1 to 9:", { branch: judges })));
      const marks = say(session.select(MARKS, { branch: judges }));
      const next = Array.from({ length: Math.min(keep, names.length) }, (_, place) => `state.${level}.${place}`);
      const pruned = say(session.prune(names, { into: next, by: "number", score_from: judges }));
      watched.push(pruned, say(session.append("\n", { branch: next })));
      levels.push({ names, children, steps, marks, pruned });
      states = next;
    }
    for (const each of watched) each.catch(() => {}); // what matters is told by the generations and prunes
    try {
      await this.#watch(levels);
      this.status = "done";
    } catch (error) {
      if (this.status === "running") Object.assign(this, { status: "failed", error: error.message });
    }
    this.seconds = (performance.now() - this.began) / 1000;
    this.version.value += 1;
    session.close();
  }

  async #watch(levels) {
    let at = [this]; // whose children a level's proposals are
    for (const [level, { names, children, steps, marks, pruned }] of levels.entries()) {
      const place = (name) => children.findIndex((group) => group.includes(name));
      const thoughts = names.map((name, i) => new Thought(at[place(name)], name, level, steps[i]));
      children.forEach((group, number) => {
        const own = group.map((name) => thoughts[names.indexOf(name)]);
        if (level === 0) this.roots = own;
        else at[number].children = own;
      });
      this.version.value += 1;
      await Promise.all(thoughts.map((thought, i) => this.#follow(thought, marks[i])));
      const { result } = await pruned;
      const kept = result.kept.map(({ from }) => thoughts[names.indexOf(from)]);
      thoughts.forEach((thought) => {
        thought.score = result.scores[thought.name] ?? null;
        if (thought.state !== "failed") thought.state = kept.includes(thought) ? "kept" : "dropped";
      });
      at = kept;
      this.version.value += 1;
    }
  }

  async #follow(thought, mark) {
    try {
      for await (const delta of thought.live.generation) thought.live.add(delta);
      const done = await thought.live.generation.result;
      thought.usage = done.usage;
      this.#count(done.usage);
      thought.state = "judged";
      this.version.value += 1;
      const judged = await mark.result;
      thought.score = Number(judged.text);
      this.#count(judged.usage);
    } catch (error) {
      thought.state = "failed";
      if (this.status !== "running") return;
      this.error = error.message;
    } finally {
      thought.live.close();
      this.version.value += 1;
    }
  }

  #count(usage) {
    for (const name of Object.keys(this.total)) this.total[name] += usage?.[name] ?? 0;
  }

  /** All thoughts so far. @returns {Thought[]} */
  get thoughts() {
    const found = [...this.roots];
    for (const each of found) found.push(...each.children);
    return found;
  }

  stop() {
    if (this.status !== "running") return;
    this.status = "stopped";
    this.#session.close();
    this.version.value += 1;
  }
}
