"""KV that is not finite: what a failed request takes with it, and what stays."""

import pytest

from ramify.protocol import messages as m
from ramify.protocol.plan import unpack

PROMPT = list(range(100, 110))


def fail(b, request: int) -> None:
    b.cache.commit(m.Commit(request, 0, final=True, finite=False))
    b.check()


def prove(b, request: int, computed: int, *, final: bool = False) -> None:
    b.cache.commit(m.Commit(request, computed, final=final, finite=True))
    b.check()


def test_what_a_failed_request_published_is_dropped(bench) -> None:
    b = bench(32)
    b.open(1, PROMPT)
    b.grant(7, 1)
    b.commit(7, 6)
    assert b.resident(1) == [6]
    fail(b, 7)
    assert b.resident(1) == [0]
    assert b.counts == (32, 0, 0)
    again = b.grant(8, 1)
    assert (again.cached, list(unpack(again.tokens))) == (0, PROMPT)


def test_what_was_computed_ahead_is_dropped_with_it(bench) -> None:
    """Nothing is sampled there, so nobody saw whether it is finite."""
    b = bench(64)
    b.open(1, PROMPT)
    b.run(6, 1)  # ahead
    b.extend(1, [1, 2, 3])
    granted = b.grant(7, 1)
    assert (granted.cached, granted.proven) == (10, False)
    fail(b, 7)
    assert b.resident(1) == [0]
    assert b.grant(8, 1).proven  # nothing found, so nothing to doubt


def test_what_others_sampled_over_stays(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.open(2, [*PROMPT, 1, 2, 3])
    b.grant(6, 1)
    prove(b, 6, 10, final=True)
    granted = b.grant(7, 2)
    assert (granted.cached, granted.proven) == (10, True)
    b.commit(7, 12)
    fail(b, 7)
    assert b.resident(1, 2) == [10, 10]


def test_a_sample_proves_the_whole_path_that_was_read(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.run(6, 1)
    b.extend(1, [1, 2, 3])
    b.grant(7, 1, extra=4)
    prove(b, 7, 13)
    b.finish(7, 13)
    b.extend(1, [4])
    assert b.grant(8, 1).proven
    fail(b, 8)
    assert b.resident(1) == [13]


def test_pages_of_another_do_not_count_as_read(bench) -> None:
    """Two compute the same; the tree keeps the first one's pages, of which the second says nothing."""
    b = bench(64)
    b.open(1, PROMPT)
    b.run(6, 1)  # [9, 10) is this one's
    b.grant(7, 1, extra=4)  # runs the last token on a page of its own
    prove(b, 7, 10)
    b.cache.commit(m.Commit(7, 12, b"\1\0\0\0" * 3, final=True, finite=True))
    b.check()
    granted = b.grant(8, 1)
    assert (granted.cached, granted.proven) == (12, False)
    fail(b, 8)
    assert b.resident(1) == [9]  # which request 7 did read


def test_running_requests_keep_their_pages_and_nobody_joins_them(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.open(2, [*PROMPT, 1])
    b.open(3, [*PROMPT, 2, 3])
    b.grant(7, 1, extra=2)
    b.commit(7, 10)  # not sampled yet
    b.grant(8, 2)
    fail(b, 7)
    assert b.resident(1, 2, 3) == [0, 0, 0]  # though request 8 still reads it
    assert b.counts == (53, 0, 11)
    granted = b.grant(9, 3)
    assert (granted.cached, granted.proven) == (0, True)
    b.commit(9, 12)
    assert b.resident(3) == [0]  # not below what nobody may find
    fail(b, 8)
    assert b.resident(2) == [0]
    prove(b, 9, 12, final=True)
    assert b.resident(1, 2, 3) == [10, 10, 12]
    assert b.counts == (52, 12, 0)


def test_a_running_request_that_samples_clears_the_suspicion(bench) -> None:
    b = bench(64)
    b.open(1, PROMPT)
    b.open(2, [*PROMPT, 1])
    b.open(3, [*PROMPT, 2, 3])
    b.grant(7, 1)
    b.commit(7, 10)
    b.grant(8, 2)
    b.extend(1, [7])
    fail(b, 7)
    b.grant(9, 3)  # computes all of it again
    prove(b, 8, 11)
    assert b.resident(1, 2) == [10, 11]
    prove(b, 9, 12, final=True)
    b.finish(8, 11)
    assert b.resident(1, 2, 3) == [10, 11, 12]


def test_branches_of_a_suspect_prefix_are_dropped_too(bench) -> None:
    b = bench(200)
    b.open(1, PROMPT)
    b.run(6, 1)
    for branch in range(2, 12):
        b.fork(1, [branch], 10)
        b.extend(branch, [branch, branch])
        b.run(20 + branch, branch)
    b.drop(5, 6)
    b.extend(1, [50])
    b.grant(7, 1)
    fail(b, 7)
    assert b.counts == (200, 0, 0)
    assert b.tokens(9) == [*PROMPT, 9, 9]
    assert b.grant(8, 9).cached == 0


def test_parts_of_pages(bench) -> None:
    b = bench(16, 4)
    b.open(1, PROMPT)
    b.run(6, 1)
    b.fork(1, [2], 9)
    b.extend(2, [1, 2])
    b.run(7, 2)
    b.extend(1, [3])
    b.grant(8, 1)
    fail(b, 8)
    assert b.counts == (16, 0, 0)
    assert b.resident(1, 2) == [0, 0]


def test_paths_that_are_kept_locked_are_dropped(bench) -> None:
    b = bench(100, reach=2)
    b.open(1)
    for i in range(20):
        b.extend(1, [i])
        b.fork(1, [100 + i], i + 1)
    b.run(6, 1)
    assert b.cache.residency.kept
    b.extend(1, [50])
    b.grant(7, 1)
    fail(b, 7)
    assert not b.cache.residency.kept
    assert b.counts == (100, 0, 0)


@pytest.mark.parametrize(
    "wrong", [m.Commit(7, 0, finite=False), m.Commit(7, 0, b"\0\0\0\0", True, False)]
)
def test_what_is_not_finite_ends_without_tokens(bench, wrong: m.Commit) -> None:
    b = bench(32)
    b.open(1, PROMPT)
    b.grant(7, 1)
    with pytest.raises(ValueError, match="not finite"):
        b.cache.commit(wrong)


def test_part_of_a_page_of_another_was_computed_again(bench) -> None:
    """So all that was read is the request's own, or what it found."""
    b = bench(16, 4)
    b.open(1, range(8))
    b.run(6, 1)
    b.fork(1, [2, 3], 4)
    b.fork(1, [4], 6)
    b.extend(4, [90, 91])
    assert b.grant(7, 4).cached == 4
    prove(b, 7, 8, final=True)
    b.extend(4, [92])
    granted = b.grant(8, 4)
    assert (granted.cached, granted.proven) == (8, True)


def test_whole_pages_of_another_do_not_count_as_read(bench) -> None:
    b = bench(16, 4)
    b.open(1, range(8))
    b.run(6, 1)
    assert b.grant(7, 1, extra=4).cached == 4  # computes [4, 8) again
    b.cache.commit(m.Commit(7, 12, b"\1\0\0\0" * 4, final=True, finite=True))
    b.check()
    b.extend(1, [5])
    granted = b.grant(8, 1)
    assert (granted.cached, granted.proven) == (12, False)


def test_what_is_above_a_dropped_part_can_be_evicted(bench) -> None:
    """It has no resident child any more, so it is put up."""
    b = bench(16)
    b.open(1, PROMPT)
    b.grant(6, 1)
    prove(b, 6, 10, final=True)
    b.extend(1, [1, 2, 3])
    b.run(7, 1)  # below, and not proven
    b.open(2, [50])
    b.run(8, 2)
    b.extend(1, [4])
    b.grant(9, 1)
    fail(b, 9)
    assert b.resident(1) == [10]
    b.open(3, range(200, 216))
    b.run(10, 3)
    assert b.resident(1, 2, 3) == [0, 0, 16]
