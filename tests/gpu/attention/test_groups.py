"""Groups of rows that share pages: against a trie built row by row, and as the kernels read them."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.gpu.attention.groups import (
    GroupArrays,
    Grouper,
    GroupLimits,
    arrange,
    find_groups,
    no_groups,
)
from ramify.gpu.step.rows import Ints, PageTable, RowTable
from ramify.protocol.plan import ExecutorInfo, ExtendRow, GrowRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
LIMITS = GroupLimits(least_depth=1, least_saved=1, least_members=2, tile_lines=3, items=4)


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Page tables of rows that fork, nested, in any order: equal pages mean equal pages before."""
    tables: list[list[int]] = [[]]
    next_page = 0
    for _ in range(draw(st.integers(1, 12))):
        parent = tables[draw(st.integers(0, len(tables) - 1))]
        kept = draw(st.integers(0, len(parent)))
        added = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(1, 4))):
            tables.append([*parent[:kept], *range(next_page, next_page + added)])
            next_page += added
    return draw(st.permutations(tables))


def table_of(rows: list[list[int]]) -> tuple[PageTable, Ints]:
    """Padded with page 0, which is also a real one: what is past the reach must not count."""
    pages = np.zeros((len(rows), max(map(len, rows)) + 1), dtype=np.int32)
    for row, own in enumerate(rows):
        pages[row, : len(own)] = own
    return pages, np.array([len(own) for own in rows])


def most_saved(rows: list[list[int]], depth: int, least_depth: int, least_members: int) -> int:
    """Page reads that the best choice of groups saves below one node of the trie."""
    children: dict[int, list[list[int]]] = defaultdict(list)
    for row in rows:
        if len(row) > depth:
            children[row[depth]].append(row)
    here = depth * (len(rows) - 1) if depth >= least_depth and len(rows) >= least_members else 0
    below = sum(most_saved(child, depth + 1, least_depth, least_members) for child in children.values())
    return max(here, below)


@given(forests(), st.integers(1, 4), st.integers(2, 4))
@settings(max_examples=300, deadline=None)
def test_the_groups_save_most(rows: list[list[int]], least_depth: int, least_members: int) -> None:
    pages, reach = table_of(rows)
    groups = find_groups(pages, np.arange(len(rows)), reach, least_depth, least_members)
    saved, first = 0, 0
    assert len(set(groups.members.tolist())) == len(groups.members)
    for count, depth in zip(groups.counts.tolist(), groups.depths.tolist(), strict=True):
        members = groups.members[first : first + count].tolist()
        first += count
        assert count >= least_members
        assert depth >= least_depth
        assert len({tuple(rows[member][:depth]) for member in members}) == 1
        assert all(len(rows[member]) >= depth for member in members)
        saved += depth * (count - 1)
    assert first == len(groups.members)
    assert saved == most_saved(rows, 0, least_depth, least_members)


@given(forests(), st.sampled_from([1, 16, 64]), st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_every_shared_key_is_in_one_item(
    rows: list[list[int]], page_size: int, tile_lines: int, items: int
) -> None:
    pages, reach = table_of(rows)
    owners = np.arange(len(rows))
    groups = find_groups(pages, owners, reach, 1)
    size = len(rows) + 3
    limits = GroupLimits(1, 1, 2, tile_lines, items)
    arrays = arrange(groups, owners, page_size, size, limits)
    read: dict[int, set[tuple[int, int]]] = defaultdict(set)  # line -> (page, token) it gets
    for line in range(size):
        depth, count, first, place = arrays.own[line].tolist()
        for item in arrays.items[first : first + count].tolist():
            row, start, stop, first_member, lines = item
            assert place < lines <= tile_lines
            assert arrays.members[first_member + place] == line
            for token in range(start, stop):
                key = int(pages[row, token // page_size]), token
                assert key not in read[line]
                read[line].add(key)
        wanted = {(rows[line][token // page_size], token) for token in range(depth)} if depth else set()
        assert read[line] == wanted
    in_use = (arrays.items[:, 2] > arrays.items[:, 1]).sum()
    assert in_use == len({int(i) for line in arrays.own for i in range(line[2], line[2] + line[1])})
    for array, empty in zip(_all(arrays), _all(no_groups(size, limits)), strict=True):
        assert (array.shape, array.dtype) == (empty.shape, empty.dtype)


def _all(arrays: GroupArrays) -> list[np.ndarray]:
    return [arrays.items, arrays.members, arrays.own]


@pytest.fixture
def table() -> RowTable:
    info = ExecutorInfo(
        model="m", architecture="a", parameters=1, vocab_size=50, context=64, page_size=4, pages=99,
        max_rows=8, step_tokens=64, device="cpu", dtype="float32", attention="triton",
        eos_token_ids=[], kv_bytes_per_token=1, load_seconds=0.0,
    )  # fmt: skip
    return RowTable(info)


def start(table: RowTable, rows: dict[int, list[int]], **plan: Any) -> None:
    """Open rows over pages whose last token is still to be computed, and compute it."""
    opens = [OpenRow(row, row, pack(pages), 4 * len(pages) - 1, GREEDY) for row, pages in rows.items()]
    extends = [ExtendRow(row, 4 * len(pages) - 1, pack([1]), True) for row, pages in rows.items()]
    table.apply(StepPlan(0, opens=opens, extends=extends, **plan))


def shared(grouper: Grouper, table: RowTable, rows: list[int], size: int = 8) -> list[int] | None:
    """How many tokens each row has in common with others."""
    index = np.array(rows)
    arrays = grouper.arrays(index, table.lengths[index], size)
    return None if arrays is None else arrays.own[: len(rows), 0].tolist()


def test_groups_follow_the_rows(table: RowTable) -> None:
    grouper = Grouper(table, LIMITS)
    start(table, {0: [5, 6, 7], 1: [5, 6, 8], 2: [9], 3: [5, 6, 8, 10]})
    # rows 1 and 3 share more, but reading two pages once for three rows saves more than three for two
    assert shared(grouper, table, [0, 1, 2, 3]) == [8, 8, 0, 8]
    assert shared(grouper, table, [1, 3]) == [12, 12]
    assert shared(grouper, table, [2, 0]) is None
    arrays = grouper.arrays(np.array([1, 3]), table.lengths[[1, 3]], 8)
    table.apply(StepPlan(1, grows=[GrowRow(row, pack([20 + row])) for row in (1, 3)],
                         decodes=pack([1, 3])))  # fmt: skip
    assert grouper.arrays(np.array([1, 3]), table.lengths[[1, 3]], 8) is not None
    again = grouper.arrays(np.array([1, 3]), table.lengths[[1, 3]], 8)
    assert arrays is not None
    assert again is not None
    assert np.array_equal(arrays.items, again.items)
    wider = grouper.arrays(np.array([1, 3]), table.lengths[[1, 3]], 16)
    assert wider is not None
    assert len(wider.own) == 16


def test_nothing_is_computed_while_nothing_changes(table: RowTable) -> None:
    grouper = Grouper(table, LIMITS)
    start(table, {0: [5, 6], 1: [5, 7]})
    rows = np.array([0, 1])
    before = grouper.arrays(rows, table.lengths[rows], 8)
    assert before is not None
    assert grouper.arrays(rows, table.lengths[rows] + 1, 8) is before


def test_a_row_that_was_opened_again_shares_what_it_holds_now(table: RowTable) -> None:
    grouper = Grouper(table, LIMITS)
    start(table, {0: [5, 6], 1: [5, 7]})
    assert shared(grouper, table, [0, 1]) == [4, 4]
    start(table, {1: [8, 9]}, closes=pack([1]))
    assert shared(grouper, table, [0, 1]) is None
    start(table, {1: [5, 6, 10]}, closes=pack([1]))
    assert shared(grouper, table, [0, 1]) == [8, 8]


def test_a_page_that_is_not_full_is_not_shared(table: RowTable) -> None:
    grouper = Grouper(table, LIMITS)
    opens = [OpenRow(row, row, pack([5, 6]), 5, GREEDY) for row in (0, 1)]
    table.apply(StepPlan(0, opens=opens, extends=[ExtendRow(row, 5, pack([1]), True) for row in (0, 1)]))
    assert shared(grouper, table, [0, 1]) == [4, 4]


@pytest.mark.parametrize(
    ("limits", "grouped"),
    [
        (GroupLimits(8, 8, 2, 3, 4), True),
        (GroupLimits(9, 8, 2, 3, 4), False),
        (GroupLimits(8, 9, 2, 3, 4), False),
        (GroupLimits(8, 8, 3, 3, 4), False),
    ],
)
def test_groups_only_where_they_pay(table: RowTable, limits: GroupLimits, grouped: bool) -> None:
    start(table, {0: [5, 6, 7], 1: [5, 6, 8]})
    assert (shared(Grouper(table, limits), table, [0, 1]) is not None) == grouped
