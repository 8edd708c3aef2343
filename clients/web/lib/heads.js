/**
 * The branches of a session as one client knows them: names, lengths, how much text is here. Pure.
 *
 * A reply or event waits for the deltas of its branch, so changes of different branches may be told in
 * another order than they were made. Each is applied when it comes: the server tells of a fork before it
 * tells of the children.
 */

/** @import { BranchState, DoneMessage, EventMessage, OkMessage, Op, OpResult } from "./protocol.js" */

/**
 * @typedef {object} Head
 * @property {number} position  the branch's length in tokens
 * @property {number} received  how far its text is here, which is where a resume starts
 */

/** The table of branches. */
export class Heads {
  /** @type {Map<string, Head>} */
  byName = new Map();
  /** The newest change of the tree that was told. @type {number | undefined} */
  revision = undefined;
  #included = -1; // the revision of the last `state` that answered an `open`

  /** For `open.have`: where each branch's text goes on. @returns {Record<string, number>} */
  have() {
    return Object.fromEntries([...this.byName].map(([name, head]) => [name, head.received]));
  }

  /** The branch; a new entry if it was not known. @param {string} name */
  get(name) {
    let head = this.byName.get(name);
    if (!head) this.byName.set(name, (head = { position: 0, received: 0 }));
    return head;
  }

  /**
   * A `state` answered `open`: it has all branches there are. The text of a branch that was not in `have`
   * comes from the running generation's start on; of one in `asked` it comes from position 0.
   *
   * @param {BranchState[]} branches @param {number} revision @param {Set<string>} asked
   */
  attached(branches, revision, asked) {
    const before = this.byName;
    this.byName = new Map();
    for (const { branch, position, started_at: start } of branches) {
      const received = before.get(branch)?.received ?? (asked.has(branch) ? 0 : start ?? position);
      this.byName.set(branch, { position, received });
    }
    this.revision = this.#included = revision;
  }

  /** Whether a reply tells of something that the last `state` did not include. @param {number} [revision] */
  news(revision) {
    if (revision === undefined) return true;
    this.#heard(revision);
    return revision > this.#included;
  }

  /** An op is done. @param {Omit<Op, "id">} op @param {OkMessage} ok */
  applied(op, { branch, position, revision, result = {} }) {
    if (!this.news(revision)) return;
    const own = Array.isArray(op.branch) ? undefined : op.branch === undefined ? "main" : op.branch;
    const head = this.byName.get(branch ?? own ?? "");
    if (op.type === "fork") {
      const at = position ?? op.at ?? 0;
      this.#born(op.as ?? [], at);
    } else if (op.type === "drop") {
      for (const name of branch ? [branch] : [op.branch ?? []].flat()) this.byName.delete(name);
    } else if (op.type === "set" && op.name) {
      this.#rename(own ?? "", op.name);
    } else if (op.type === "rollback" && head && position !== undefined) {
      head.position = position;
      head.received = Math.min(head.received, position);
    } else if (op.type !== "prune" && head && position !== undefined) {
      const rebased = result.rebased; // the strict template moved the branch back
      head.position = rebased === undefined ? Math.max(head.position, position) : position;
      if (rebased !== undefined) head.received = Math.min(head.received, rebased);
    }
    this.#placed(result);
  }

  /** A generation is over. Its branch may have gone since, if `done` is sent again. @param {DoneMessage} done */
  ended({ branch, position, revision, rebased }) {
    if (!this.news(revision) && !this.byName.has(branch)) return;
    const head = this.get(branch);
    if (rebased !== undefined) head.position = head.received = position; // a choice that begins with the last text
    head.position = Math.max(head.position, position);
    head.received = Math.max(head.received, position);
  }

  /** Another client changed the tree. @param {EventMessage} event */
  noted(event) {
    const { revision, op, branch, details = {} } = event;
    this.#heard(revision);
    const { position, rebased } = details;
    if (branch === undefined) return;
    if (op === "drop") {
      this.byName.delete(branch);
    } else if (op !== "prune" && position !== undefined) {
      if (event.op === "set" && event.details?.from !== undefined) this.#rename(event.details.from, branch);
      const head = this.get(branch);
      if (op === "rollback") head.received = Math.min(head.received, position);
      if (rebased !== undefined) head.received = Math.min(head.received, rebased);
      if (op !== "fork") head.position = position;
      if (event.op === "fork") this.#born(event.details?.as ?? [], position);
    }
    this.#placed(details);
  }

  /** @param {number} revision */
  #heard(revision) {
    this.revision = Math.max(this.revision ?? revision, revision);
  }

  /** @param {string[]} names @param {number} at */
  #born(names, at) {
    for (const name of names) if (!this.byName.has(name)) this.byName.set(name, { position: at, received: at });
  }

  /** @param {string} from @param {string} to */
  #rename(from, to) {
    const head = this.byName.get(from);
    if (!head) return;
    this.byName.delete(from);
    this.byName.set(to, head);
  }

  /** Branches that a prune moved: their text is known by another name. Then those that went. @param {OpResult} result */
  #placed({ kept = [], dropped = [] }) {
    for (const { from, into, position } of kept) {
      if (into !== from) this.byName.set(into, { position, received: position });
    }
    for (const name of dropped) this.byName.delete(name);
  }
}
