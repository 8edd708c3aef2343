"""States of an automaton that no short text tells apart: their masks of short tokens are equal. Pure.

An automaton of texts of at most 200 characters counts them, so no two states are equal; but far from the
end all take the same tokens. Found by refining a partition (Moore 1956), one round for each byte. A
round looks only at states before those that just moved to a new block, so it is cheap if these are few.
"""

import numpy as np
from numpy.typing import NDArray


def alike(next: NDArray[np.int32], depth: int) -> NDArray[np.int64]:
    """Find the block of each state: states of a block take the same texts of at most `depth` bytes.

    `next`: int32 [states, classes], the next state or -1; each number below -1 counts as a next state of
    its own kind.
    """
    size, columns = next.shape
    random = np.random.default_rng(0x2545F4914F6CDD1D)
    factors = random.integers(0, 1 << 64, columns + 1, np.uint64)
    before, begins = _predecessors(next)
    blocks = np.zeros(size, np.int64)
    sizes = np.array([size])
    looked_at = np.arange(size)
    for _ in range(depth):
        rows = np.empty((len(looked_at), columns + 1), np.int64)
        ways = next[looked_at]
        rows[:, :-1] = np.where(ways >= 0, blocks[np.maximum(ways, 0)], ways)
        rows[:, -1] = own = blocks[looked_at]
        hashes = (rows.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
        _, first, group, counts = np.unique(
            hashes, return_index=True, return_inverse=True, return_counts=True
        )
        if (rows != rows[first[group]]).any():  # two hashes of 64 bits were equal
            return np.arange(size)
        # Who was not looked at keeps the block. Where all of it was, the largest group does.
        old = own[first]
        kept = np.zeros(len(first), np.bool_)
        whole = np.bincount(old, counts, minlength=len(sizes)) == sizes
        order = np.lexsort((-counts, old))
        largest = order[np.unique(old[order], return_index=True)[1]]
        kept[largest] = whole[old[largest]]
        numbers = np.where(kept, old, 0)
        numbers[~kept] = np.arange(len(sizes), len(sizes) + int((~kept).sum()))
        moved = ~kept[group]
        if not moved.any():
            break
        np.subtract.at(sizes, old[~kept], counts[~kept])
        sizes = np.concatenate([sizes, counts[~kept]])
        changed = looked_at[moved]
        blocks[changed] = numbers[group[moved]]
        looked_at = _all_before(changed, before, begins)
    return blocks


def _predecessors(next: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """List the states before each state, one after another, and where those of each begin."""
    new = next >= 0
    new[:, 1:] &= next[:, 1:] != next[:, :-1]  # one edge for neighbouring columns with the same target
    sources, at = np.nonzero(new)
    targets = next[sources, at]
    order = np.argsort(targets, kind="stable")
    begins = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=len(next)))])
    return sources[order], begins


def _all_before(
    states: NDArray[np.int64], before: NDArray[np.int64], begins: NDArray[np.int64]
) -> NDArray[np.int64]:
    counts = begins[states + 1] - begins[states]
    starts = np.repeat(begins[states] - (np.cumsum(counts) - counts), counts)
    return np.unique(before[starts + np.arange(len(starts))])
