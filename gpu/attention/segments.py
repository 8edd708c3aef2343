"""The KV slots of decoding sequences, cut into runs that can be read in place.

Copying keys and values out of the pool costs more than attending to them (16 sequences of 512
tokens: 14 ms a layer against 0.7 ms), so slots that lie side by side are read as a view, and a
run that several sequences share (the prefix of a fork) is read once for all of them. The rest, short
runs in no order, is gathered and padded. Attention over the parts is merged afterwards by their
log-sum-exp. Pure numpy; this file knows slots, not tensors.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
SHORTEST_RUN = 48  # tokens below which a call of its own costs more than gathering


@dataclass(slots=True)
class SlotRun:
    """A run of slots [start, stop), read by the sequences `readers` (indices into the decodes)."""

    start: int
    stop: int
    readers: list[int]


@dataclass(slots=True)
class Segments:
    """The keys of all decodes: each is in exactly one run of its sequence or in its rest."""

    runs: list[SlotRun]
    readers: Slots  # [R] sequences that have a rest
    rest: Slots  # [R, longest rest] slots, padded
    rest_lens: Slots  # [R]


def cut(slots: list[Slots], padding_slot: int, shortest: int = SHORTEST_RUN) -> Segments:
    """Cut each sequence's slots (in order of position) into runs and a rest."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)  # start -> (length, sequence)
    rests: list[list[Slots]] = [[] for _ in slots]
    for sequence, own in enumerate(slots):
        for first, last in _runs(own):
            if last - first >= shortest:
                found[int(own[first])].append((last - first, sequence))
            else:
                rests[sequence].append(own[first:last])
    runs = [run for start, members in found.items() for run in _share(start, members)]
    readers = np.array([i for i, parts in enumerate(rests) if parts], dtype=np.int64)
    lens = np.array([sum(map(len, rests[i])) for i in readers], dtype=np.int64)
    rest = np.full((len(readers), int(lens.max(initial=0))), padding_slot, dtype=np.int64)
    for line, sequence in enumerate(readers.tolist()):
        rest[line, : lens[line]] = np.concatenate(rests[sequence])
    return Segments(runs, readers, rest, lens)


def _runs(slots: Slots) -> list[tuple[int, int]]:
    """Find the index ranges [first, last) over which the slots are consecutive."""
    if slots[-1] - slots[0] == len(slots) - 1 and (len(slots) < 3 or (np.diff(slots) == 1).all()):
        return [(0, len(slots))]
    edges = np.flatnonzero(np.diff(slots) != 1) + 1
    bounds = [0, *edges.tolist(), len(slots)]
    return list(pairwise(bounds))


def _share(start: int, members: list[tuple[int, int]]) -> list[SlotRun]:
    """Make runs that begin at one slot, cut where some of their readers end."""
    if len(members) == 1:
        length, sequence = members[0]
        return [SlotRun(start, start + length, [sequence])]
    runs = []
    begin = 0
    for length in sorted({length for length, _ in members}):
        readers = [sequence for reach, sequence in members if reach >= length]
        runs.append(SlotRun(start + begin, start + length, readers))
        begin = length
    return runs
