/**
 * The answers to one `tree`, put together: whole histories again, whatever was sent once or in parts.
 *
 * A server sends as much as fits (`next` says where to go on), and the turns that a fork shares with its parent only
 * there (`turns_from`). Pure.
 */

/** @import { BranchState, StateMessage } from "./protocol.js" */

/** One `state` that shows everything. @param {StateMessage[]} pages  the answers, in order; at least one
 *  @returns {StateMessage} */
export function wholeTree(pages) {
  /** @type {Map<string, BranchState>} */
  const branches = new Map();
  for (const page of pages) {
    for (const branch of page.branches ?? []) {
      const known = branches.get(branch.branch)?.turns;
      const end = known?.at(-1)?.start ?? -1;
      const turns = known ? [...known, ...(branch.turns ?? []).filter(({ start }) => start > end)] : branch.turns;
      branches.set(branch.branch, { ...branch, ...(turns && { turns }) });
    }
  }
  const complete = new Set();
  for (const name of branches.keys()) inherit(name, branches, complete);
  const { next, ...last } = /** @type {StateMessage} */ (pages.at(-1));
  return { ...last, branches: [...branches.values()] };
}

/** Give a branch, and those that it was forked off, their parents' turns. Chains may be long: no recursion.
 *  @param {string} name @param {Map<string, BranchState>} branches @param {Set<string>} complete */
function inherit(name, branches, complete) {
  const chain = [];
  for (let branch = branches.get(name); branch && !complete.has(branch.branch); branch = branches.get(branch.parent ?? "")) {
    complete.add(branch.branch);
    chain.push(branch);
    if (branch.turns_from === undefined) break;
  }
  for (const branch of chain.reverse()) {
    const { turns, turns_from: start, parent } = branch;
    if (turns && start !== undefined) {
      const before = branches.get(parent ?? "")?.turns ?? [];
      branch.turns = [...before.filter(({ end }) => end <= start), ...turns];
    }
    delete branch.turns_from;
  }
}
