/** The branches of a session, as a server shows them, as the messages of a chat. Pure. */

const MARKS = /<\|?[^<>|\n]{1,40}\|?>/g; // special tokens of chat templates, in input that came as raw text

/**
 * The messages of all branches; what branches share is one message. Each has the `branch` that it was found on, and its
 * `end` there, with what the template wrote behind it.
 *
 * @param {import("../../../lib/index.js").BranchState[]} branches  with their turns and texts
 * @param {Map<string, object>} [known]  messages that were read before: the same keep when they were made
 * @returns {{messages: object[], ends: Map<string, object | null>}} `ends`: the last message of each branch
 */
export function messagesOf(branches, known = new Map()) {
  const messages = new Map();
  const paths = new Map();
  const ends = new Map();
  for (const branch of parentsFirst(branches)) {
    const { path, last } = pathOf(branch, paths.get(branch.parent) ?? [], messages, known);
    paths.set(branch.branch, path);
    ends.set(branch.branch, last);
  }
  return { messages: [...messages.values()], ends };
}

/** The messages of a branch; those that it shares with its parent are the parent's. */
function pathOf({ branch, turns = [] }, above, messages, known) {
  const path = [];
  let last = null;
  let shared = true;
  for (const [i, turn] of turns.entries()) {
    const same = shared && above[i] && above[i].turn.start === turn.start && above[i].turn.end === turn.end && above[i].turn.op === turn.op;
    shared = Boolean(same);
    const rest = turn.kind === "input" && !turn.messages?.length && turn.op === turns[i - 1]?.op; // of one with pictures
    const said = same || rest ? null : read(turn);
    const message = same ? above[i].message : said && { ...blank(known, `${branch} ${turn.start}`), ...said, branch, parent: last?.id ?? null };
    if (message && !same) messages.set(message.id, message);
    if (!message && !same && last?.branch === branch) last.end = turn.end;
    path.push({ turn, message });
    last = message ?? last;
  }
  return { path, last };
}

/** A message as it was known, without what the server tells. */
function blank(known, id) {
  return { id, created: known.get(id)?.created ?? Date.now() + known.size, state: "done" };
}

/** What a turn of the server's tree says; null where only the template wrote. */
function read({ kind, role, text = "", start, end, op, messages }) {
  if (kind === "output") return { role: "assistant", text, start, end, op };
  const said = messages?.at(-1);
  if (said?.role === "tool") return { role: "tool", text: said.content, results: messages.map(({ name, content }) => ({ name: name ?? "tool", text: content })), start, end, op };
  if (said) return { role: said.role === "assistant" ? "assistant" : "user", text: said.content ?? "", system: messages.find((each) => each.role === "system" && each !== said)?.content, start, end, op };
  if (role === "assistant") return null;
  const plain = text.replace(MARKS, "").replace(/^\s*(system|user|tool)\s*\n/, "").trim();
  return plain ? { role: "user", text: plain, start, end, op } : null;
}

function parentsFirst(branches) {
  const byName = new Map(branches.map((each) => [each.branch, each]));
  const done = new Set();
  const order = [];
  for (const each of branches) {
    const chain = [];
    for (let at = each; at && !done.has(at.branch); at = byName.get(at.parent)) {
      done.add(at.branch);
      chain.push(at);
    }
    order.push(...chain.reverse());
  }
  return order;
}
