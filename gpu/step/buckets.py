"""Steps of fixed sizes: which sizes there are, and which one a step fits.

A CUDA graph runs a step of one size, so a step is padded to the next size that was captured, its
`Bucket`. The token lines of the extends come first, then those of the decodes, each part with its
padding behind it (`inputs` lays them out). Padding belongs to a spare row of the executor, at position
0, whose page is the pool's padding slot: its results are garbage (maybe NaN), which only padding reads.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ramify.gpu.step.rows import StepRows

_EXTENDED = (16, 32, 64, *range(128, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))
_DECODES = (0, 8, 32, 64, 128, 192, 256, 384, 512)
_ROUND = 16  # lines: a kernel meets its arguments always at the same alignment
_MOST_RUNS = 32


@dataclass(frozen=True, slots=True)
class Bucket:
    """A step's size: `extended` tokens in at most `runs` extends, `decodes`, `sampling` lines.

    Without extends every line samples. `grouped`: decodes alone, some of which share a prefix.
    `drafted`: decodes alone, several of which may be of one row.
    """

    extended: int
    runs: int
    decodes: int
    sampling: int
    grouped: bool = False
    drafted: bool = False

    @property
    def lines(self) -> int:
        return self.extended + self.decodes


def decode_buckets(max_rows: int) -> list[Bucket]:
    """List the sizes of steps of decodes, from small to `max_rows`, dense where padding costs most."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 257, 16), *range(320, max_rows, 64)]
    sizes = [size for size in sizes if size < max_rows] + [max_rows]
    return [Bucket(0, 0, size, size) for size in sizes]


def mixed_buckets(max_rows: int, longest: int) -> list[Bucket]:
    """List the sizes of steps with extends of up to `longest` tokens, alone or beside decodes.

    From few lines to many. `runs` is bounded: each run may end in a tile of its own, and empty tiles
    cost time.
    """
    decodes = [count for count in _DECODES if count < max_rows] + [max_rows]
    extended = [size for size in _EXTENDED if size <= longest]
    made = []
    for size in extended:
        runs = min(size, max_rows, max(4, min(_MOST_RUNS, size // 32)))
        made += [Bucket(size, runs, count, min(runs + count, max_rows)) for count in decodes]
    return sorted(made, key=lambda bucket: (bucket.lines, bucket.extended))


class BucketTable:
    """The plain buckets of graphs, searched for the smallest that holds a step."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._groups: dict[int, list[Bucket]] = {}  # by `extended`, each in the order of `decodes`
        plain = (bucket for bucket in buckets if not (bucket.grouped or bucket.drafted))
        for bucket in sorted(plain, key=lambda bucket: (bucket.extended, bucket.decodes)):
            self._groups.setdefault(bucket.extended, []).append(bucket)
        self._sizes = {
            extended: [bucket.decodes for bucket in group] for extended, group in self._groups.items()
        }

    def find(self, step: StepRows) -> Bucket | None:
        """Find the smallest bucket that holds the step; None: there is none."""
        decodes = len(step.rows) - step.extends
        for extended, group in self._groups.items():
            fits = extended == 0 if step.extends == 0 else extended >= len(step.tokens)
            if not fits or step.extends > group[0].runs:
                continue
            at = bisect_left(self._sizes[extended], decodes)
            if at < len(group):
                return group[at]
        return None


def tailored(step: StepRows, padded: bool) -> Bucket:
    """Make a bucket of just this step's size. `padded`: extends are padded to a multiple of 16 lines."""
    extended = len(step.tokens)
    if padded:
        extended = -(-extended // _ROUND) * _ROUND
    return Bucket(extended, step.extends, len(step.rows) - step.extends, len(step.sampling))


def largest(max_rows: int, step_tokens: int) -> Bucket:
    """Make the bucket of the largest step that there can be."""
    extended = -(-step_tokens // _ROUND) * _ROUND
    return Bucket(extended, min(step_tokens, max_rows), max_rows, max_rows)


NOTHING = StepRows(
    rows=np.empty(0, dtype=np.int64),
    starts=np.empty(0, dtype=np.int64),
    counts=np.empty(0, dtype=np.int64),
    extends=0,
    tokens=np.empty(0, dtype=np.int32),
    sampling=np.empty(0, dtype=np.int64),
    draws=np.empty(0, dtype=np.int64),
)
"""A step without lines: laid into a bucket, it is all padding."""
