/**
 * Which branch holds which conversation: a trie of chat turns, so that an edit or a retry goes on where the
 * conversations part, and nothing is computed or sent twice. Pure.
 */

/** @import { Turn } from "./ai-messages.js" */

/** A turn that a branch holds: up to `position`, which is undefined while it is being appended. */
export class Place {
  /** @type {Map<string, Place>} */ children = new Map();

  /** @param {string} branch @param {number} [position] */
  constructor(branch, position) {
    this.branch = branch;
    this.position = position;
  }
}

/** The turns of all conversations of a session. */
export class Turns {
  #root = new Place("", 0);
  /** @type {Map<string, number>} branch -> when it was used last */ #used = new Map();
  #clock = 0;

  /** How many branches it knows. */
  get size() {
    return this.#used.size;
  }

  /**
   * Where a conversation goes on: the place of the last turn that is known with its position, and how many turns
   * that are.
   *
   * @param {Turn[]} turns @returns {{place: Place | null, known: number}}
   */
  find(turns) {
    let [place, found, known] = [this.#root, /** @type {Place | null} */ (null), 0];
    for (const [i, turn] of turns.entries()) {
      const next = place.children.get(key(turn));
      if (!next) break;
      place = next;
      if (place.position !== undefined) [found, known] = [place, i + 1];
    }
    return { place: found, known };
  }

  /** A conversation's last turn is on this branch; `position` may come later. @param {Turn[]} turns
   *  @param {string} branch @param {number} [position] */
  add(turns, branch, position) {
    let place = this.#root;
    for (const [i, turn] of turns.entries()) {
      let next = place.children.get(key(turn));
      if (!next) place.children.set(key(turn), (next = new Place(branch)));
      if (i === turns.length - 1 && next.position === undefined) Object.assign(next, { branch, position });
      place = next;
    }
    this.use(branch);
    return place;
  }

  /** A branch is needed now. @param {string} branch */
  use(branch) {
    this.#used.delete(branch);
    this.#used.set(branch, ++this.#clock);
  }

  /** The branch that was not used for longest, but for those that are `kept`. @param {Set<string>} kept */
  oldest(kept) {
    return [...this.#used.keys()].find((branch) => !kept.has(branch));
  }

  /** A branch is gone: what it shared with others is found there, the rest is forgotten. @param {string} branch */
  drop(branch) {
    this.#used.delete(branch);
    /** @type {Place[]} */ const order = [this.#root]; // parents before children; no recursion: chats may be long
    for (let i = 0; i < order.length; i += 1) order.push(.../** @type {Place} */ (order[i]).children.values());
    for (const place of order.reverse()) {
      for (const [name, child] of place.children) if (child.branch === branch) place.children.delete(name);
      if (place.branch !== branch) continue;
      const [heir] = place.children.values();
      if (heir) place.branch = heir.branch; // which was forked off behind this turn
    }
  }

  /** The session is gone with all its branches. */
  clear() {
    this.#root = new Place("", 0);
    this.#used.clear();
  }
}

/** What makes two turns the same. @param {Turn} turn */
function key({ role, content = "", tool_calls: calls, tool_call_id: id, images }) {
  return JSON.stringify([role, content, calls ?? null, id ?? null, images ?? null]);
}
