"""The places of pictures in a step: the positions that rotate tokens, and the lines that show pictures.

With M-RoPE a token has three positions: time, row, column. A picture's tokens differ in the last two,
and the text after it goes on where the larger side ends. This file knows rows and positions, not towers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ramify.gpu.step.rows import PlanError
from ramify.gpu.step.staging import Array
from ramify.gpu.step.step_rows import StepRows, Tokens
from ramify.protocol.pictures import PlacedPicture

Ints = npt.NDArray[np.int64]
RowPictures = Mapping[int, Sequence[PlacedPicture]]
SEEN_BEHIND = "seen_behind"  # in a plan: `seen_behind`
MOVED_TURNS = "moved_turns"  # in a plan: int32[3, T], `turns_of` minus the position


class PictureLines(NamedTuple):
    """The lines of a step that show a part of a picture. `offsets`: which of its vectors each is."""

    placed: PlacedPicture
    lines: Ints
    offsets: Ints


def lines_of(rows: Array, positions: Array, pictures: RowPictures) -> Iterator[PictureLines]:
    """Find the lines that show pictures in a step whose lines run `positions` [T] of `rows` [T]."""
    for row, placed in pictures.items():
        own = np.flatnonzero(rows == row)
        if len(own):
            at = positions[own].astype(np.int64)
            for each in placed:
                row_at, column = np.divmod(at - each.start, each.columns + each.gap)
                inside = (at >= each.start) & (at < each.stop) & (column < each.columns)
                if inside.any():
                    offsets = row_at[inside] * each.columns + column[inside]
                    yield PictureLines(each, own[inside], offsets)


def turns_of(rows: Array, positions: Array, pictures: RowPictures) -> Ints:
    """Compute the three positions of each line: int64[3, T]."""
    turns = np.repeat(positions.astype(np.int64)[None], 3, 0)
    for row, placed in pictures.items():
        own = np.flatnonzero(rows == row)
        at = positions[own].astype(np.int64)
        for each in placed:
            turns[:, own[at >= each.stop]] -= each.shift
    for each, lines, offsets in lines_of(rows, positions, pictures):
        turns[:, lines] -= offsets
        turns[1, lines] += offsets // each.columns
        turns[2, lines] += offsets % each.columns
    return turns


def extending(step: StepRows, pictures: RowPictures) -> RowPictures:
    """Find rows with lines that may stand before the end of a picture: extends, given tokens.

    Sampled tokens stand after all of a row's pictures.
    """
    rows = step.rows[: step.extends + len(step.given)].tolist()
    return {row: pictures[row] for row in rows if row in pictures}


def shows(step: StepRows, pictures: RowPictures) -> bool:
    """Whether the step runs a token of a picture."""
    runs = step.extends + len(step.given)
    rows, starts = step.rows[:runs].tolist(), step.starts[:runs].tolist()
    for row, start, count in zip(rows, starts, step.counts[:runs].tolist(), strict=True):
        placed = pictures.get(row, ())
        if any(each.start < start + count and start < each.stop for each in placed):
            return True
    return False


def seen_behind(step: StepRows, pictures: RowPictures) -> Tokens:
    """Count how many tokens after itself each line sees, up to the end of its picture: int32[T].

    For models whose pictures are seen whole. Raises PlanError where an extend ends inside of one.
    """
    found, first = np.zeros(step.computed, dtype=np.int32), 0
    extends = (part[: step.extends].tolist() for part in (step.rows, step.starts, step.counts))
    for row, start, count in zip(*extends, strict=True):
        for each in pictures.get(row, ()):
            low, high = max(each.start, start), min(each.stop, start + count)
            if low < high:
                if high < each.stop:
                    raise PlanError(f"row {row} is extended up to {high}, inside of a picture up to "
                                    f"{each.stop} that is seen whole")  # fmt: skip
                found[first + low - start : first + high - start] = np.arange(high - low)[::-1]
        first += count
    return found


def lay_moved_turns(
    moved: Array, rows: Array, positions: Array, shifts: Ints, extended: RowPictures
) -> None:
    """Fill `moved` int32[3, T] for lines that run `positions` [T] of `rows` [T].

    `shifts` [rows]: by how much text after all pictures of a row is moved back. `extended`: rows with
    lines that may stand before the end of a picture.
    """
    moved[:] = -shifts[rows.astype(np.int64)]
    own = np.flatnonzero(np.isin(rows, list(extended)))
    if len(own):
        at = positions[own].astype(np.int64)
        moved[:, own] = turns_of(rows[own], at, extended) - at
