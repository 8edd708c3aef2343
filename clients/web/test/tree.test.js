import assert from "node:assert/strict";
import { test } from "node:test";

import { wholeTree } from "../lib/tree.js";

const turn = (start, end) => ({ start, end });
const starts = ({ branches }) => branches.map(({ branch, turns }) => [branch, turns?.map(({ start }) => start)]);

test("a tree in pages is put together", () => {
  const state = wholeTree([
    { revision: 3, next: { branch: "main", position: 2 },
      branches: [{ branch: "c", parent: "b", turns_from: 6, turns: [turn(6, 7)] }, { branch: "main", turns: [turn(0, 2)] }] },
    { revision: 3, branches: [{ branch: "main", turns: [turn(2, 9)] },
      { branch: "b", parent: "main", turns_from: 2, turns: [turn(2, 6)] }] },
  ]);
  assert.equal(state.next, undefined);
  assert.deepEqual(starts(state), [["c", [0, 2, 6]], ["main", [0, 2]], ["b", [0, 2]]]);
});

test("a chain of forks may be long, and a circle is no end", () => {
  const branches = Array.from({ length: 1000 }, (_, i) =>
    ({ branch: `b${i}`, parent: `b${i - 1}`, ...(i && { turns_from: i }), turns: [turn(i, i + 1)] }));
  assert.equal(wholeTree([{ branches: branches.reverse() }]).branches[0].turns.length, 1000);
  wholeTree([{ branches: [{ branch: "x", parent: "y", turns_from: 1, turns: [] }, { branch: "y", parent: "x", turns_from: 1, turns: [] }] }]);
});
