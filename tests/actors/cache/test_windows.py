"""Tails and rings of window pages, step by step. `test_model` has random programs."""

import numpy as np
import pytest

from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.windows import Ring, Tails, Windows, windows_of
from ramify.gpu.executors.fake import FakeExecutor
from ramify.protocol import messages as m
from ramify.protocol.plan import pack, unpack
from tests.actors.cache.integrity import IntegrityError, check

WINDOWS = Windows(window=101, pages=1000, chunk=100, slack=4)


class Cache:
    """A cache of a model with a window of 101 tokens, checked after each message."""

    def __init__(self, windows: Windows = WINDOWS, pages: int = 4000) -> None:
        self.cache = RadixCache(pages, windows=windows)
        self.count = 0

    @property
    def tails(self) -> Tails:
        tails = self.cache.residency.snapshots
        assert isinstance(tails, Tails)
        return tails

    @property
    def taken(self) -> int:
        return self.tails.total - self.tails.allocator.free_pages

    def open(self, tokens: int | list[int], branch: int = 1) -> None:
        self.cache.open_branch(m.OpenBranch(branch))
        self.extend(tokens, branch)

    def extend(self, tokens: int | list[int], branch: int = 1) -> None:
        given = list(range(tokens)) if isinstance(tokens, int) else tokens
        self.cache.extend_branch(m.ExtendBranch(branch, pack(given)))

    def acquire(self, branch: int = 1, extra: int = 0, more: int = 0) -> m.Granted | m.Denied:
        self.count += 1
        verdict = self.cache.acquire(m.Acquire(self.count, branch, extra, slots=more))
        check(self.cache)
        return verdict

    def grant(self, branch: int = 1, extra: int = 0, more: int = 0) -> m.Granted:
        verdict = self.acquire(branch, extra, more)
        assert isinstance(verdict, m.Granted), verdict
        return verdict

    def commit(self, computed: int, request: int = 0, tokens: int = 0, written: int = 0) -> None:
        """`written`: it is final."""
        output, final = pack(range(9000, 9000 + tokens)), written > 0
        told = m.Commit(request or self.count, computed, output, final, final or None, b"", written)
        self.cache.commit(told)
        check(self.cache)

    def run(self, branch: int = 1) -> m.Granted:
        """A prompt without an output."""
        granted = self.grant(branch)
        end = granted.cached + len(granted.tokens) // 4
        self.commit(end, written=end)
        return granted


def test_a_request_begins_at_the_deepest_tail_and_replays_what_has_kv_behind() -> None:
    cache = Cache()
    cache.open(300)
    first = cache.run()
    assert (first.cached, first.replayed, len(unpack(first.windows))) == (0, 0, 300)
    cache.cache.fork_branch(m.ForkBranch(1, [2], 250))
    cache.extend([7, 8, 9], 2)
    fork = cache.grant(2)
    assert (fork.cached, fork.replayed) == (0, 250)  # its tails stand at 299 and 300
    cache.extend([5] * 20)
    turn = cache.grant(1)
    assert (turn.cached, turn.replayed) == (300, 0)
    windows = unpack(turn.windows)
    assert len(windows) == 120  # 100 before it, and its own
    table = unpack(first.windows).tolist()
    assert windows.tolist()[:100] == table[200:300]


def test_tails_close_to_each_other_share_their_pages() -> None:
    cache = Cache()
    cache.open(300)
    cache.run()
    assert sorted(len(pages) for pages in cache.tails.pages.values()) == [100, 100]
    assert cache.taken == 101
    for branch in (2, 3, 4):
        cache.cache.fork_branch(m.ForkBranch(1, [branch], 300))
        cache.extend([branch], branch)
        cache.run(branch)
    assert cache.taken == 104


def test_a_long_prompt_holds_a_ring_and_gives_it_back_as_it_goes() -> None:
    cache = Cache()
    cache.open(3000)
    granted = cache.grant(more=50)
    # a ring, and the tails at 512, 1024, 1536, 2048, 2560 and 2999
    assert len(set(unpack(granted.windows))) == 200 + 6 * 100
    held = cache.tails.held
    for computed in range(100, 3001, 100):
        cache.commit(computed)
    assert held > cache.tails.held == 99 + 108  # of the last tail, and what it decodes with
    cache.commit(3000, written=3000)
    assert cache.tails.held == 0


def test_what_a_run_decodes_with_is_its_own_from_the_start() -> None:
    """A Grow never waits for window pages, so no run is retracted for them."""
    cache = Cache()
    cache.open(10)
    cache.grant(extra=4, more=1000)
    cache.commit(10)
    assert cache.tails.held >= 108
    taken = cache.taken
    for _ in range(100):
        grown = cache.cache.grow(m.Grow(cache.count, 10))
        assert len(grown.windows) == len(grown.pages) == 40
        check(cache.cache)
    assert cache.taken == taken
    cache.commit(1009, tokens=1000, written=1012)
    assert [len(pages) for pages in cache.tails.pages.values()] == [100]


def test_steps_too_many_leave_no_tail() -> None:
    """What they have written over the window is not known, or might be."""
    cache = Cache()
    cache.open(3000)
    cache.grant()
    cache.commit(600)
    cache.commit(600, written=800)  # cancelled, with two steps under way
    assert {tail.node.end for tail in cache.tails.all()} == {512}
    cache.grant()
    cache.commit(700)  # an op ended at 600 now
    cache.commit(700, written=800)
    assert {tail.node.end for tail in cache.tails.all()} == {512, 600, 700}


def test_a_tail_that_saves_little_for_its_pages_gives_way() -> None:
    windows = WINDOWS._replace(pages=520)
    cache = Cache(windows)
    for branch, length in enumerate((1000, 150, 800), 1):
        cache.open([branch] * length, branch)
        cache.run(branch)
    cache.open([9] * 400, 9)
    cache.grant(9)
    kept = {branch: cache.cache.inspect(m.Inspect(1, 1, [branch])).resident[0] for branch in (1, 2, 3)}
    assert kept[1] >= 999
    assert kept[2] == 0
    assert kept[3] >= 799


def test_a_request_is_denied_for_window_pages_and_holds_nothing() -> None:
    cache = Cache(WINDOWS._replace(pages=WINDOWS.least + 50))
    cache.open([1] * 300, 1)
    cache.open([2] * 300, 2)
    cache.grant(1)
    held, free = cache.tails.held, cache.cache.free
    denied = cache.acquire(2)
    assert isinstance(denied, m.Denied)
    assert (denied.reason, denied.slots > 0, denied.short) == ("memory", True, 0)
    assert (cache.tails.held, cache.cache.free) == (held, free)
    cache.commit(300, request=1, written=300)
    cache.grant(2)


def test_kv_that_goes_takes_its_tail_along() -> None:
    cache = Cache(pages=700)
    cache.open([1] * 400, 1)
    cache.run(1)
    cache.open([2] * 500, 2)
    cache.run(2)
    assert cache.cache.inspect(m.Inspect(1, 1, [1])).resident == [0]
    assert all(tail.node.tokens[0] == 2 for tail in cache.tails.all())


def test_logits_that_are_not_finite_drop_their_tails() -> None:
    cache = Cache()
    cache.open(400)
    cache.grant()
    cache.commit(399)
    assert cache.tails.pages
    cache.cache.commit(m.Commit(cache.count, 0, final=True, finite=False))
    check(cache.cache)
    assert not cache.tails.pages
    assert cache.taken == 0


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens and 300 pages are the least"):
        Cache(WINDOWS._replace(pages=299))
    with pytest.raises(ValueError, match="need pages of 1 token"):
        RadixCache(100, 4, windows=WINDOWS)
    cache = Cache()
    cache.cache.renew(4000, 500)
    assert cache.tails.total == 500
    with pytest.raises(ValueError, match="the least"):
        cache.cache.renew(4000, 10)


def test_the_pool_of_an_executor() -> None:
    assert windows_of(FakeExecutor().info, 2) is None
    info = FakeExecutor(window=8, window_pages=900, step_tokens=64, drafts=3).info
    assert windows_of(info, 2) == Windows(8, 900, 64, 12)
    both = FakeExecutor(window=8, window_pages=900, state_slots=4).info
    with pytest.raises(ValueError, match="both fixed states and window pages"):
        windows_of(both, 2)


def test_a_ring_never_writes_over_what_its_window_reads() -> None:
    kept = np.zeros(40, dtype=np.bool_)
    kept[10:15] = True
    fresh = np.arange(100, 125, dtype=np.int32)
    ring = Ring(5, np.arange(3, dtype=np.int32), fresh, kept, 20, 12)
    assert len(ring.pages) == 28
    for position in range(8, 48):
        page = ring.table[position - 5]
        earlier = ring.table[max(0, position - 19 - 5) : position - 5]
        assert page not in earlier
    assert len(ring.leave(30)) == 3 + 5 + 2  # what it began from, what others get, and its own
    assert len(ring.leave(48)) == 6
    with pytest.raises(RuntimeError, match="are gone"):
        ring.span(47, 48)
    assert len(set(ring.grow(12, 12).tolist())) == 12
    ring = Ring(0, np.empty(0, dtype=np.int32), fresh[:4], np.zeros(4, dtype=np.bool_), 4, 4)
    with pytest.raises(RuntimeError, match="position 4 would overwrite 0"):
        ring.grow(1, 5)


def test_the_check_finds_pages_that_are_counted_wrongly() -> None:
    cache = Cache()
    cache.open(300)
    cache.run()
    cache.tails.tails[int(next(iter(cache.tails.pages.values()))[0])] += 1
    with pytest.raises(IntegrityError, match="window page"):
        check(cache.cache)
