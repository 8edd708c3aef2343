import assert from "node:assert/strict";
import { test } from "node:test";

import { Turns } from "../lib/ai-tree.js";

const said = (...texts) => texts.map((content, i) => ({ role: i % 2 ? "assistant" : "user", content }));
const found = (turns, ...texts) => {
  const { place, known } = turns.find(said(...texts));
  return place && [place.branch, place.position, known];
};

/** one -> two -> three on branch a; an edit of "three" on branch b. */
function tree() {
  const turns = new Turns();
  turns.add(said("one"), "a", 5);
  turns.add(said("one", "two"), "a", 8);
  turns.add(said("one", "two", "three"), "a", 12);
  turns.add(said("one", "two", "drei"), "b", 13);
  return turns;
}

test("a conversation goes on where it is known", () => {
  const turns = tree();
  assert.deepEqual(found(turns, "one", "two", "three", "four"), ["a", 12, 3]);
  assert.deepEqual(found(turns, "one", "two", "trois"), ["a", 8, 2]);
  assert.deepEqual(found(turns, "one", "two", "drei"), ["b", 13, 3]);
  assert.equal(found(turns, "eins"), null);
  assert.equal(turns.size, 2);
});

test("turns that were appended together have no place of their own", () => {
  const turns = new Turns();
  turns.add(said("one", "two", "three"), "a", 9);
  assert.equal(found(turns, "one", "two"), null);
  assert.deepEqual(found(turns, "one", "two", "three"), ["a", 9, 3]);
  turns.add(said("one"), "b", 4);
  assert.deepEqual(found(turns, "one", "two"), ["b", 4, 1]);
});

test("what a dropped branch shared is found on those that were forked off it", () => {
  const turns = tree();
  turns.drop("a");
  assert.deepEqual(found(turns, "one", "two", "three"), ["b", 8, 2]);
  assert.deepEqual(found(turns, "one"), ["b", 5, 1]);
  turns.drop("b");
  assert.equal(found(turns, "one"), null);
  assert.equal(turns.size, 0);
});

test("the branch that was not used for longest goes first, but for those that run", () => {
  const turns = tree();
  assert.equal(turns.oldest(new Set()), "a");
  turns.use("a");
  assert.equal(turns.oldest(new Set()), "b");
  assert.equal(turns.oldest(new Set(["b"])), "a");
  assert.equal(turns.oldest(new Set(["a", "b"])), undefined);
});

test("long conversations need no stack", () => {
  const turns = new Turns();
  const long = said(...Array.from({ length: 3000 }, (_, i) => String(i)));
  for (let i = 1; i <= long.length; i += 50) turns.add(long.slice(0, i), "a", i);
  turns.drop("a");
  assert.equal(turns.find(long).place, null);
});
