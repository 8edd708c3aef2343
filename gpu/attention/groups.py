"""Groups of decoding rows that share pages, for an attention pass that reads these once.

Two branches of one tree hold the same page at an index of their page tables if and only if all tokens
before it are the same, so comparing one page tells whether two rows share so much. The page tables form
a trie, and its nodes are the candidates for groups. Where a fork lies within a fork, the depth that
saves most reads is taken. All lines are compared at once, in numpy, and only when the set of rows
changes. This file knows page tables, neither tensors nor kernels.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ramify.gpu.step.inputs import Plan
from ramify.gpu.step.rows import Ints, PageTable, RowTable

Int32s = npt.NDArray[np.int32]

ITEM_FIELDS = 5
OWN_FIELDS = 4
_LEVELS = 6  # forks within forks that are looked at
_PROBES = 32  # depths that are compared at once
_STEP = 64  # a stretch of keys is a multiple of this


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits from which groups pay, in tokens, and the cuts of a pass. Measured: see docs/log/gpu.md.

    `least_depth`: shorter prefixes are left to the plain pass. `least_saved`: reads that groups must
    save in the whole step. `least_members`: of one group. `tile_lines`: lines of one work item.
    `items`: how many items are wanted at once, so that they fill the device.
    """

    least_depth: int
    least_saved: int
    least_members: int
    tile_lines: int
    items: int

    def capacity(self, size: int) -> int:
        """Count items that a step of `size` lines can need: `items` stretches, each group's last."""
        return self.items + size // self.least_members + size // self.tile_lines


@dataclass(slots=True)
class Groups:
    """A set of G groups. Group g is the next counts[g] of `members`, which share `depths[g]` pages."""

    members: Ints  # indices of lines
    counts: Ints  # [G]
    depths: Ints  # [G]


@dataclass(slots=True)
class GroupArrays:
    """A step's groups as the kernels read them.

    items: the row whose pages are read, first and last (excluded) token, index of the item's first
    line in `members`, number of lines. A line's own: the first token that is not shared, the
    number of its items, the first of them, the line's place in them.
    """

    items: Int32s  # [capacity, 5]; an unused one has no tokens
    members: Int32s  # [size]
    own: Int32s  # [size, 4]

    def named(self) -> Plan:
        """Name the arrays as fields of a step."""
        return {"shared_items": self.items, "members": self.members, "own": self.own}

    def of_runs(self, firsts: Ints, counts: Ints, lines: int, size: int) -> "GroupArrays":
        """Expand groups of runs to groups of a step's `size` lines; a run is lines of one program.

        Run i is the next counts[i], at most `lines`, from line firsts[i] on. A run fills the places of
        `lines` lines of an item, the last of them twice, so that those of a run follow each other.
        """
        items = self.items.copy()
        items[:, 3:] *= lines
        used = self.members[:, None]
        members = firsts[used] + np.minimum(np.arange(lines), counts[used] - 1)
        own = np.zeros((size, OWN_FIELDS), dtype=np.int32)
        own[firsts] = self.own[: len(firsts)]
        own[:, 3] *= lines
        return GroupArrays(items, members.reshape(-1).astype(np.int32), own)


def is_grouped(plan: Plan) -> bool:
    """Whether some decodes read keys together."""
    return "shared_items" in plan


class Grouper:
    """Finder of groups, which keeps those of the last set of rows."""

    def __init__(self, table: RowTable, limits: GroupLimits) -> None:
        self._table = table
        self.limits = limits
        self._key: bytes = b""
        self._groups: Groups | None = None
        self._arrays: GroupArrays | None = None

    def arrays(self, rows: Ints, starts: Ints, size: int) -> GroupArrays | None:
        """Find groups of lines that decode at positions `starts` of `rows`, padded to `size` lines.

        None if groups would not pay. Returns the same arrays as long as nothing changes.
        """
        if size < self.limits.least_members:
            return None
        # a row's shared pages are settled when it is opened: growing adds pages of its own
        key = rows.tobytes() + self._table.openings[rows].tobytes()
        if key != self._key:
            self._key = key
            self._groups = self._find(rows, starts)
            self._arrays = None
        if self._groups is None:
            return None
        if self._arrays is None or len(self._arrays.own) != size:
            page_size = self._table.page_size
            self._arrays = arrange(self._groups, rows, page_size, size, self.limits)
        return self._arrays

    def _find(self, rows: Ints, starts: Ints) -> Groups | None:
        limits, page_size = self.limits, self._table.page_size
        least = -(-limits.least_depth // page_size)
        starts = starts - self._table.unsettled[rows]  # drafts of steps in flight may be refused
        groups = find_groups(self._table.pages, rows, starts // page_size, least, limits.least_members)
        saved = int(((groups.counts - 1) * groups.depths).sum()) * page_size
        return groups if len(groups.counts) and saved >= limits.least_saved else None


def no_groups(size: int, limits: GroupLimits) -> GroupArrays:
    """Make the arrays of a step in which every line reads all of its keys itself."""
    return GroupArrays(
        items=np.zeros((limits.capacity(size), ITEM_FIELDS), dtype=np.int32),
        members=np.zeros(size, dtype=np.int32),
        own=np.zeros((size, OWN_FIELDS), dtype=np.int32),
    )


def find_groups(
    pages: PageTable, rows: Ints, reach: Ints, least_depth: int, least_members: int = 2
) -> Groups:
    """Find groups of lines that share at least `least_depth` whole pages.

    pages int32[rows, columns]; line i is row rows[i] and may share its first reach[i] pages. The lines
    of a group hold the same page at index depth - 1, so the tokens before it are the same. Their
    earlier pages may be copies, if two rows computed the same tokens at the same time.
    """
    levels = _trie(pages, rows, reach, max(1, least_depth), max(2, least_members))
    members, counts, depths = [], [], []
    for level, taken in zip(levels, _choose(levels), strict=True):
        if taken.any():
            members.append(level.lines[np.repeat(taken, level.counts)])
            counts.append(level.counts[taken])
            depths.append(level.depths[taken])
    if not members:
        nothing = np.empty(0, dtype=np.int64)
        return Groups(nothing, nothing, nothing)
    return Groups(np.concatenate(members), np.concatenate(counts), np.concatenate(depths))


@dataclass(slots=True)
class _Level:
    """A level of the trie: nodes, each with at least the wanted number of lines below it."""

    lines: Ints  # node after node
    counts: Ints  # [N]
    depths: Ints  # [N] pages that all lines of a node share
    parents: Ints  # [N] nodes of the level above; the topmost have none


def _trie(
    pages: PageTable, rows: Ints, reach: Ints, least_depth: int, least_members: int
) -> list[_Level]:
    """Build the page tables' trie, level by level: a level ends where lines part."""
    levels: list[_Level] = []
    lines = np.flatnonzero(reach >= least_depth)
    owners = np.zeros(len(lines), dtype=np.int64)
    known = np.full(1, least_depth)  # of an owner: pages that a child's lines share at least
    while len(lines) >= least_members and len(levels) < _LEVELS:
        labels = pages[rows[lines], known[owners] - 1]
        order = np.argsort(labels)  # a page has one place in the tree: it tells owners apart
        lines, owners, labels = lines[order], owners[order], labels[order]
        edges = np.flatnonzero((np.diff(labels) != 0) | (np.diff(owners) != 0)) + 1
        firsts = np.concatenate(([0], edges))
        counts = np.diff(np.concatenate((firsts, [len(lines)])))
        wide = counts >= least_members
        if not wide.any():
            break
        if not wide.all():
            lines = lines[np.repeat(wide, counts)]
            firsts, counts = firsts[wide], counts[wide]
        parents = owners[firsts]
        depths = _common(pages, rows[lines], reach[lines], counts, known[parents])
        levels.append(_Level(lines, counts, depths, parents))
        owners = np.repeat(np.arange(len(counts)), counts)
        further = reach[lines] > depths[owners]
        lines, owners, known = lines[further], owners[further], depths + 1
    return levels


def _common(pages: PageTable, rows: Ints, reach: Ints, counts: Ints, known: Ints) -> Ints:
    """Count the pages that all lines of each node share, at least `known`.

    Two lines of each node are compared first. Most nodes part where these two do, and then one look at
    all lines confirms it.
    """
    flat = pages.reshape(-1)
    row_starts = rows * pages.shape[1] - 1  # so that a depth leads to the last page within it
    firsts = np.cumsum(counts) - counts
    one, other = row_starts[firsts], row_starts[firsts + counts - 1]
    low, high = known, _common_of_two(flat, one, other, known, np.minimum.reduceat(reach, firsts))
    middle = high
    while (low < high).any():
        found = flat[row_starts + np.repeat(middle, counts)]
        same = np.logical_and.reduceat(found == np.repeat(found[firsts], counts), firsts)
        low, high = np.where(same, middle, low), np.where(same, high, middle - 1)
        middle = (low + high + 1) >> 1
    return low


def _common_of_two(flat: Int32s, one: Ints, other: Ints, low: Ints, high: Ints) -> Ints:
    """Count the pages that pairs of page tables, at `one` and `other`, share: `low` to `high`."""
    pairs = np.arange(len(one))
    while (low < high).any():
        step = (high - low + _PROBES - 1) // _PROBES
        depths = np.minimum(low + step * np.arange(1, _PROBES + 1)[:, None], high)  # [probes, pairs]
        same = flat[one + depths] == flat[other + depths]
        apart = np.where(same.all(0), _PROBES, same.argmin(0))
        reached = depths[np.maximum(apart, 1) - 1, pairs]
        failed = depths[np.minimum(apart, _PROBES - 1), pairs] - 1
        low, high = np.where(apart > 0, reached, low), np.where(apart < _PROBES, failed, high)
    return low


def _choose(levels: list[_Level]) -> list[npt.NDArray[np.bool_]]:
    """Choose the nodes that become groups: no line is in two, and most page reads are saved."""
    below: list[Ints] = []  # reads that the nodes' children can save
    saved = np.empty(0, dtype=np.int64)
    parents = saved
    for level in reversed(levels):
        children = np.bincount(parents, saved, len(level.counts)).astype(np.int64)
        below.append(children)
        saved, parents = np.maximum((level.counts - 1) * level.depths, children), level.parents
    taken: list[npt.NDArray[np.bool_]] = []
    covered = np.zeros(1, dtype=np.bool_)
    for level, children in zip(levels, reversed(below), strict=True):
        over = covered[level.parents]
        chosen = ~over & ((level.counts - 1) * level.depths >= children)
        taken.append(chosen)
        covered = over | chosen
    return taken


def arrange(groups: Groups, rows: Ints, page_size: int, size: int, limits: GroupLimits) -> GroupArrays:
    """Cut groups into items of about equal work: tiles of lines times stretches of keys."""
    arrays = no_groups(size, limits)
    tiles = -(-groups.counts // limits.tile_lines)  # of each group
    tokens = groups.depths * page_size
    total = int((tiles * tokens).sum())
    stretch = max(2, -(-total // (limits.items * _STEP))) * _STEP
    cuts = -(-tokens // stretch)  # stretches of each group
    lengths = -(-tokens // (cuts * _STEP)) * _STEP

    group = np.repeat(np.arange(len(tiles)), tiles)  # of each tile
    ordinal = np.arange(len(group)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    even, odd = np.divmod(groups.counts, tiles)
    lines = even[group] + (ordinal < odd[group])
    first_line = np.cumsum(lines) - lines
    first_item = np.cumsum(cuts[group]) - cuts[group]

    tile = np.repeat(np.arange(len(group)), cuts[group])  # of each item
    start = (np.arange(len(tile)) - first_item[tile]) * lengths[group[tile]]
    items = arrays.items[: len(tile)]
    items[:, 0] = rows[groups.members[first_line[tile]]]
    items[:, 1] = start
    items[:, 2] = np.minimum(start + lengths[group[tile]], tokens[group[tile]])
    items[:, 3] = first_line[tile]
    items[:, 4] = lines[tile]

    arrays.members[: len(groups.members)] = groups.members
    own_tile = np.repeat(np.arange(len(group)), lines)  # of each member
    own = np.empty((len(own_tile), OWN_FIELDS), dtype=np.int32)
    own[:, 0] = tokens[group[own_tile]]
    own[:, 1] = cuts[group[own_tile]]
    own[:, 2] = first_item[own_tile]
    own[:, 3] = np.arange(len(own_tile)) - first_line[own_tile]
    arrays.own[groups.members] = own
    return arrays
