/** What a program holds of a branch: `Branch`, the ops of a session for one name. */

/** @import { BranchState, ChatMessage, GenerateFields, JoinFields, KvHints, OkMessage, PruneFields, Role, SelectFields }
 *    from "./protocol.js" */
/** @import { Generation } from "./generation.js" */
/** @import { Abortable, Session, Short, Shown } from "./session.js" */

/** @typedef {Omit<GenerateFields, "n" | "as"> & Short & Abortable} Alone  Options of one generation. */

const MARK = "\ufffc"; // where a picture stands in text

/** A branch by name. Cheap: make as many as you like; the server has the branch itself. */
export class Branch {
  /** @param {Session} session @param {string} name */
  constructor(session, name) {
    this.session = session;
    this.name = name;
  }

  /** Its length in tokens as far as this client has heard; undefined: no such branch is known. */
  get position() {
    return this.session.position(this.name);
  }

  /** Add input: raw text, chat messages (through the model's template), or token ids. `images`: see `Session.append`.
   *  @param {string | ChatMessage[] | number[]} input
   *  @param {{expect?: number, logprobs?: boolean | number} & Shown & Abortable} [options]
   *  @returns {Promise<OkMessage>} */
  append(input, options = {}) {
    return this.session.append(input, { ...options, branch: this.name });
  }

  /** Append one chat turn. `images`: before the text, or where it has U+FFFC.
   *  @param {string} content @param {{role?: Role} & Shown & Abortable} [options] */
  say(content, { role = "user", ...options } = {}) {
    const marks = content.includes(MARK) ? "" : MARK.repeat(options.images?.length ?? 0);
    return this.append([{ role, content: marks + content }], options);
  }

  /** Append a chat turn and generate the answer, in one frame. `images`: as of `say`.
   *  @param {string} content @param {{role?: Role} & Shown & Alone} [options]
   *  @returns {Generation} */
  chat(content, { role = "user", images, ...options } = {}) {
    this.say(content, { role, images, signal: options.signal }).catch(() => {}); // the generation tells of it
    return this.generate(options);
  }

  /** Generate. @param {Alone} [options] @returns {Generation} */
  generate(options = {}) {
    return this.session.generate({ ...options, branch: this.name });
  }

  /** Fork `n` children and generate on each. `as`: their names.
   *  @param {number} n @param {GenerateFields & Short & Abortable} [options] @returns {Generation[]} */
  generateMany(n, options = {}) {
    const as = options.as ?? this.session.freshNames(this.name, n);
    return this.session.generate({ ...options, n, as, branch: this.name });
  }

  /** Append the likeliest of several texts. The result has `text`, `choice` (its index) and `scores`.
   *  @param {string[]} choices @param {SelectFields & Abortable} [options] @returns {Generation} */
  select(choices, options = {}) {
    return this.session.select(choices, { ...options, branch: this.name });
  }

  /** Children that share this branch up to its head, or up to position `at`.
   *  @param {string | string[]} names @param {{at?: number} & Abortable} [options] */
  async fork(names, options = {}) {
    const as = [names].flat();
    await this.session.fork(as, { ...options, branch: this.name });
    return as.map((name) => new Branch(this.session, name));
  }

  /** What each source generated last, once it has, becomes input of this branch; then the sources are dropped.
   *  @param {(Branch | string)[]} sources @param {JoinFields & Abortable} [options] */
  join(sources, options = {}) {
    return this.session.join(namesOf(sources), { ...options, branch: this.name });
  }

  /** The best source takes this branch's place; all sources go. See `Session.prune`.
   *  @param {(Branch | string)[]} sources
   *  @param {Omit<PruneFields, "k"> & {score_from?: (Branch | string)[]} & Abortable} [options] */
  prune(sources, { score_from: judges, ...options } = {}) {
    const more = judges && { score_from: namesOf(judges) };
    return this.session.prune(namesOf(sources), { ...options, ...more, into: [this.name] });
  }

  /** Move the head back: `to` a position, or by `turns` appended turns.
   *  @param {{to?: number, turns?: number} & Abortable} where */
  rollback(where) {
    return this.session.rollback({ ...where, branch: this.name });
  }

  /** Rename, keep its KV warm for a while, or attach facts of your own.
   *  @param {{name?: string, retain_s?: number, persist?: "none" | "lazy" | "sync", meta?: Record<string, unknown>, hints?: KvHints} & Abortable} fields */
  async set(fields) {
    const ok = await this.session.set({ ...fields, branch: this.name });
    if (fields.name !== undefined) this.name = fields.name;
    return ok;
  }

  /** Release the branch. @param {Abortable} [options] */
  drop(options = {}) {
    return this.session.drop(this.name, options);
  }

  /** Stop its generations, which end with what they have. `subtree`: and all that runs or waits on it and on
   *  what was forked off it. @param {{subtree?: boolean}} [options] */
  cancel({ subtree } = {}) {
    return this.session.cancel({ branch: this.name, subtree });
  }

  /** The branch as the server sees it; `text` and `tokens` add its turns.
   *  @param {{text?: boolean, tokens?: boolean} & Abortable} [options] @returns {Promise<BranchState>} */
  async tree(options = {}) {
    const { branches } = await this.session.tree({ ...options, branch: this.name });
    return /** @type {BranchState} */ (branches.find(({ branch }) => branch === this.name));
  }

  /** Flow control: let the server deliver text up to this position. @param {number} upto */
  credit(upto) {
    this.session.credit(this.name, upto);
  }
}

/** The names of branches, or of branches that an op of the same frame makes. @param {(Branch | string)[]} branches */
export function namesOf(branches) {
  return branches.map((branch) => (typeof branch === "string" ? branch : branch.name));
}
