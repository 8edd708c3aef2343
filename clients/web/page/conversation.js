/**
 * A chat as the page knows it: branches of turns, kept in step with the server by positions.
 *
 * Pure: no DOM, no socket. The server's tree is the truth; this is a copy to draw from. What the tree
 * does not tell (what the user typed, before the chat template; what a generation cost) is in `notes`.
 *
 * @typedef {{kind: "input" | "output", role: string, start: number, end?: number, op?: number, text: string,
 *   system?: string, usage?: object, reason?: string, message?: string}} Turn
 *   [start, end) are positions in tokens; `end` is not known before the server has answered.
 * @typedef {{name: string, parent?: string, at: number, turns: Turn[]}} Branch
 */

const MARKS = /<\|?[^<>|\n]{1,40}\|?>/g; // special tokens of chat templates, for turns nobody noted

export class Conversation {
  /** @param {ReturnType<Conversation["snapshot"]>} [kept] */
  constructor(kept) {
    this.notes = kept?.notes ?? { messages: {}, bills: {} };
    /** @type {Map<string, Branch>} */ this.branches = new Map();
    for (const branch of kept?.branches ?? [{ name: "main", at: 0, turns: [] }]) this.branches.set(branch.name, branch);
  }

  /** What a refreshed page needs, also where the server has forgotten the session; plain data. */
  snapshot() {
    return { notes: this.notes, branches: [...this.branches.values()] };
  }

  /** Take over the branches of a `state` that has text. Turns that stay the same stay the same objects. */
  load(state) {
    const before = this.branches;
    this.branches = new Map(state.branches.map((each) => [each.branch, this.#branch(each, before.get(each.branch))]));
  }

  #branch({ branch: name, parent, at = 0, turns = [], started_at: started = Infinity, reason }, before) {
    const known = [];
    for (const piece of turns) {
      if (piece.start >= started) break; // it is being written: its stream has the text
      const turn = this.#turn(piece);
      const last = known.at(-1);
      if (turn) known.push(same(before?.turns[known.length], turn) ?? turn);
      else if (last) last.end = piece.end; // the template's prompt or end of turn belongs to the turn before
    }
    const last = known.at(-1);
    if (last?.kind === "output" && last.end === turns.at(-1).end) last.reason ??= reason;
    return { name, parent, at, turns: known };
  }

  /** A turn to show; null for what only the chat template wrote. */
  #turn({ kind, role, start, end, op, text = "" }) {
    if (kind === "output") {
      return { kind, role: "assistant", start, end, op, text, ...this.notes.bills[`${op} ${start}`] };
    }
    const noted = this.notes.messages[op];
    const last = noted?.at(-1);
    if (last?.role === role && text.includes(last.content.trim())) return { ...shown(noted), start, end, op };
    if (role === "assistant") return null;
    const plain = text.replace(MARKS, "").replace(/^\s*(system|user|tool)\s*\n/, "").trim();
    return plain ? { kind, role: role ?? "user", start, end, op, text: plain } : null;
  }

  /** The user's turn goes onto `branch`; its end is not known before `ok`. @returns {Turn} */
  append(name, messages) {
    const branch = this.branches.get(name);
    const turn = { ...shown(messages), start: this.end(name) };
    branch.turns.push(turn);
    return turn;
  }

  /** An append was answered. */
  appended(turn, messages, { id, position, result }) {
    Object.assign(turn, { op: id, end: position }, result?.rebased !== undefined && { start: result.rebased });
    this.notes.messages[id] = messages;
  }

  /** The append failed: nothing is on the branch. */
  refused(name, turn) {
    const turns = this.branches.get(name)?.turns ?? [];
    if (turns.includes(turn)) turns.splice(turns.indexOf(turn), 1);
  }

  /** A generation ended: its text becomes a turn. */
  answered(name, { id, position, reason, usage, text, message }) {
    const branch = this.branches.get(name);
    if (!branch) return;
    const start = usage?.prompt ?? this.end(name);
    const bill = { reason, ...(usage && { usage }), ...(message && { message }) };
    this.notes.bills[`${id} ${start}`] = bill;
    const turn = { kind: "output", role: "assistant", start, end: position, op: id, text, ...bill };
    const known = branch.turns.findIndex((each) => each.kind === "output" && each.start === start);
    if (known >= 0) branch.turns.splice(known, 1, turn);
    else branch.turns.push(turn);
  }

  /** Children of `name` at position `at`. */
  forked(name, children, at) {
    const turns = this.branches.get(name).turns.filter((turn) => turn.end <= at);
    for (const child of children) this.branches.set(child, { name: child, parent: name, at, turns: [...turns] });
  }

  rolledBack(name, to) {
    const branch = this.branches.get(name);
    branch.turns = branch.turns.filter((turn) => turn.end <= to);
  }

  /** Position after the last turn. */
  end(name) {
    return this.branches.get(name)?.turns.at(-1)?.end ?? 0;
  }

  /** Branches without a (living) parent. */
  roots() {
    return [...this.branches.values()].filter(({ parent }) => !this.branches.has(parent));
  }

  children(name) {
    return [...this.branches.values()].filter(({ parent }) => parent === name);
  }

  /** Answers to choose from: children that fork where this branch ends with a question. */
  answers(name) {
    const branch = this.branches.get(name);
    if (branch?.turns.at(-1)?.kind !== "input") return [];
    return this.children(name).filter(({ at }) => at === this.end(name));
  }

  /** What is the branch's own, not inherited. */
  own({ turns, at }) {
    return turns.filter(({ end }) => end === undefined || end > at);
  }

  /** A name for people: the branch's own first question, else its answer. */
  label(branch) {
    const own = this.own(branch);
    const text = (own.find(({ kind }) => kind === "input") ?? own[0])?.text.trim().slice(0, 80);
    if (text) return text;
    const place = branch.parent ? this.answers(branch.parent).indexOf(branch) : -1;
    return place >= 0 ? `Answer ${place + 1}` : branch.parent ? "New branch" : "New chat";
  }

  /** `count` names that no branch has. */
  names(count) {
    const names = [];
    for (let i = 2; names.length < count; i += 1) if (!this.branches.has(`b${i}`)) names.push(`b${i}`);
    return names;
  }

  /**
   * The ops that make this tree again in an empty session, in order; the text counts, not the tokens.
   * @returns {{op: "append" | "fork" | "root", branch?: string, as?: string, turn?: Turn}[]}
   */
  replay() {
    const ops = [];
    const grow = (branch, shared) => {
      const children = this.children(branch.name).map((child) => ({ child, kept: common(branch, child) }));
      for (let i = 0; i <= branch.turns.length; i += 1) {
        for (const { child } of children.filter(({ kept }) => kept === i && kept >= shared)) {
          ops.push({ op: "fork", branch: branch.name, as: child.name });
        }
        if (i >= shared && i < branch.turns.length) {
          ops.push({ op: "append", branch: branch.name, turn: branch.turns[i] });
        }
      }
      for (const { child, kept } of children) {
        const forked = kept >= shared; // else it left before this branch began
        if (!forked) ops.push({ op: "root", as: child.name });
        grow(child, forked ? kept : 0);
      }
    };
    for (const root of this.roots()) {
      if (root.name !== "main") ops.push({ op: "root", as: root.name });
      grow(root, 0);
    }
    return ops;
  }
}

/** How many turns `child` still shares with the branch it was forked off. */
function common(branch, child) {
  const differs = child.turns.findIndex((turn, i) => {
    const mine = branch.turns[i];
    return !mine || turn.end > child.at || turn.kind !== mine.kind || turn.text !== mine.text;
  });
  return differs < 0 ? child.turns.length : differs;
}

/** The turn that was known before, if it is the one that the server has. */
function same(before, turn) {
  if (!before || before.op !== turn.op || before.text !== turn.text || before.start !== turn.start) return null;
  return Object.assign(before, { end: turn.end });
}

/** The turn that a list of messages shows as: the last one, with the system prompt beside it. */
function shown(messages) {
  const { role, content } = messages.at(-1);
  const system = messages.find((each) => each.role === "system")?.content;
  return { kind: role === "assistant" ? "output" : "input", role, text: content, ...(system && { system }) };
}
