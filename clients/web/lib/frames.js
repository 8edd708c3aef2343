/** Ops as JSON, and what may go into one frame. Pure. */

import { BadRequest } from "./errors.js";

const HALF_PAIR = /(?<!\\)(?:\\\\)*\\ud[89a-f][0-9a-f]{2}/; // JSON.stringify escapes no other surrogates
const bytesOf = new TextEncoder();

/**
 * The JSON text of an op without its id. Throws BadRequest for what JSON would change without a word.
 *
 * @param {object} op
 */
export function encoded(op) {
  const text = JSON.stringify(op, (key, value) => {
    if (typeof value === "number" && !Number.isFinite(value)) throw new BadRequest(`\`${key}\` is ${value}: give a finite number`);
    if (typeof value === "bigint") throw new BadRequest(`\`${key}\` is a BigInt: give a number or a string`);
    return value;
  });
  if (HALF_PAIR.test(text)) throw new BadRequest("a text holds half of a surrogate pair: use toWellFormed()");
  return text;
}

/** The text of a frame. @param {{id?: number, json: string}[]} tickets */
export function frameOf(tickets) {
  const ops = tickets.map(({ id, json }) => `{"id":${id},${json.slice(1)}`);
  return ops.length === 1 ? /** @type {string} */ (ops[0]) : `[${ops.join(",")}]`;
}

/** Bytes of an op in a frame, with an id of any length. @param {string} json */
export function bytes(json) {
  return bytesOf.encode(json).length + 24;
}

/** How many ops at the beginning of a frame fit into `limits`. @param {{json: string}[]} tickets
 *  @param {Record<string, number>} limits */
export function fitting(tickets, { ops_per_frame: most = Infinity, frame_bytes: room = Infinity }) {
  let size = 2;
  const over = tickets.findIndex(({ json }, i) => {
    size += bytes(json);
    return i >= most || size > room;
  });
  return over < 0 ? tickets.length : over;
}

/** Whether an op reads or changes one of these branches. @param {import("./protocol.js").Op} op @param {Set<string>} names */
export function touches(op, names) {
  return branchesOf(op).some((name) => names.has(name));
}

/** The branches that an op names. @param {Omit<import("./protocol.js").Op, "id">} op @returns {string[]} */
export function branchesOf({ type, branch, as = [], from = [], into = [], score_from: judges = [], name }) {
  if (type === "cancel" || type === "tree" || type === "export" || type === "close") return [];
  const own = branch ?? (branch === undefined && type !== "prune" && type !== "set" ? "main" : []);
  return [own, as, from, into, judges, name ?? []].flat();
}
