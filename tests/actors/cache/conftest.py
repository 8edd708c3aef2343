"""A cache with short words for its messages, checked after each of them."""

from collections.abc import Callable, Sequence

import pytest

from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.residency import REACH
from ramify.protocol import messages as m
from ramify.protocol.plan import pack, unpack
from tests.actors.cache.integrity import check


class Bench:
    """Speaks to a RadixCache in lists of ints. `now` is the clock of acquire and grow."""

    def __init__(self, pages: int, page_size: int = 1, reach: int = REACH) -> None:
        self.cache = RadixCache(pages, page_size, reach)
        self.now = 0.0

    def check(self) -> None:
        check(self.cache)

    def open(self, branch: int, tokens: Sequence[int] = (), namespace: str = "") -> None:
        self.cache.open_branch(m.OpenBranch(branch, namespace))
        if tokens:
            self.extend(branch, tokens)

    def extend(self, branch: int, tokens: Sequence[int]) -> None:
        self.cache.extend_branch(m.ExtendBranch(branch, pack(tokens)))
        check(self.cache)

    def fork(self, branch: int, children: list[int], at: int) -> None:
        self.cache.fork_branch(m.ForkBranch(branch, children, at))
        check(self.cache)

    def move(self, branch: int, to: int) -> None:
        self.cache.move_branch(m.MoveBranch(branch, to))
        check(self.cache)

    def retain(self, branch: int, until: float) -> None:
        self.cache.retain_branches(m.RetainBranches({branch: until}))
        check(self.cache)

    def drop(self, *branches: int) -> None:
        self.cache.drop_branches(m.DropBranches(list(branches)))
        check(self.cache)

    def acquire(
        self, request: int, branch: int, extra: int = 0, rerun: int | None = None
    ) -> m.Granted | m.Denied:
        verdict = self.cache.acquire(m.Acquire(request, branch, extra, rerun=rerun), self.now)
        check(self.cache)
        return verdict

    def grant(self, request: int, branch: int, extra: int = 0, rerun: int | None = None) -> m.Granted:
        verdict = self.acquire(request, branch, extra, rerun)
        assert isinstance(verdict, m.Granted), verdict
        return verdict

    def grow(self, request: int, tokens: int) -> list[int]:
        pages = unpack(self.cache.grow(m.Grow(request, tokens), self.now).pages)
        check(self.cache)
        return list(pages)

    def commit(self, request: int, computed: int) -> None:
        self.cache.commit(m.Commit(request, computed))
        check(self.cache)

    def finish(self, request: int, computed: int, tokens: Sequence[int] = ()) -> None:
        self.cache.commit(m.Commit(request, computed, pack(tokens), final=True))
        check(self.cache)

    def run(self, request: int, branch: int) -> m.Granted:
        """A prefill of the whole branch, from grant to final commit."""
        granted = self.grant(request, branch)
        self.finish(request, len(self.tokens(branch)))
        return granted

    def tokens(self, branch: int) -> list[int]:
        return list(unpack(self.cache.tree.tokens(self.cache.branches.head(branch), 0)))

    def resident(self, *branches: int) -> list[int]:
        return self.cache.inspect(m.Inspect(1, 1, list(branches))).resident

    @property
    def counts(self) -> tuple[int, int, int]:
        """Free, evictable, referenced."""
        return self.cache.free, self.cache.evictable, self.cache.referenced


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """A factory: `bench(pages, page_size, reach)`."""
    return Bench
