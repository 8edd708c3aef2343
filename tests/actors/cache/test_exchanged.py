"""Blocks that other replicas ask for and send: what is lacking, given, on its way, and found."""

from ramify.actors.cache.cache import RadixCache
from ramify.protocol import messages as m
from ramify.protocol.cluster import KEY, Lacking, ReadBlocks, SeekBlocks
from ramify.protocol.plan import pack, unpack
from tests.actors.cache.integrity import check

A = list(range(100, 118))
BRANCH = 1 << 32 | 1


class Stage:
    """A cache of 32 pages, whose blocks have 4 tokens."""

    def __init__(self, host: int = 8) -> None:
        self.cache = RadixCache(32, 1, 64, 4, host_blocks=host)

    def has(self, tokens: list[int], *, computed: bool = True, namespace: str = "") -> None:
        self.cache.open_branch(m.OpenBranch(BRANCH, namespace))
        self.cache.extend_branch(m.ExtendBranch(BRANCH, pack(tokens)))
        if computed:
            assert isinstance(self.cache.acquire(m.Acquire(BRANCH, BRANCH, 0)), m.Granted)
            self.cache.commit(m.Commit(BRANCH, len(tokens), final=True, finite=True))

    def lacks(self) -> Lacking:
        return self.cache.lacking(SeekBlocks(1, BRANCH))

    def settle(self, **what: list[object]) -> m.Settled:
        settled = self.cache.settle(m.Settle([], [], [], **what))  # type: ignore[arg-type]
        check(self.cache)
        return settled

    def gives(self, first: int, keys: bytes) -> list[bytes]:
        settled = self.settle(reads=[ReadBlocks(1, BRANCH, first, keys)])
        assert [s.key for s in settled.saves] == [b.key for b in settled.reads[0]][: len(settled.saves)]
        return [block.key for block in settled.reads[0]]


def test_what_one_lacks_another_gives_and_it_is_found_once_it_is_there() -> None:
    source, target = Stage(), Stage()
    source.has(A)
    target.has(A, computed=False)
    lacking = target.lacks()
    assert (lacking.first, len(lacking.keys)) == (0, 4 * KEY)
    given = source.gives(0, lacking.keys)
    assert b"".join(given) == lacking.keys
    (slots,) = target.settle(puts=[lacking.keys]).slots
    assert len(set(unpack(slots))) == 4
    assert target.lacks() == lacking  # they come, and are not here yet
    target.settle(kept=[lacking.keys[: 3 * KEY]], refused=[lacking.keys[3 * KEY :]])
    assert (target.lacks().first, len(target.lacks().keys)) == (3, KEY)
    granted = target.cache.acquire(m.Acquire(BRANCH, BRANCH, 0, load=True))
    assert isinstance(granted, m.Granted)
    assert (granted.cached, granted.loaded) == (12, 12)
    check(target.cache)
    tiers = {each.tier: each for each in target.cache.tiers(1)}
    assert (tiers["peer"].blocks, tiers["peer"].hit_tokens, tiers["host"].blocks) == (3, 12, 0)


def test_only_what_is_missing_is_lacking() -> None:
    source, target = Stage(), Stage()
    source.has(A)
    target.has(A[:9])
    target.cache.extend_branch(m.ExtendBranch(BRANCH, pack(A[9:])))
    lacking = target.lacks()
    assert (lacking.first, len(lacking.keys)) == (2, 2 * KEY)
    assert len(source.gives(lacking.first, lacking.keys)) == 2


def test_another_tenants_block_is_neither_found_nor_given() -> None:
    source, target = Stage(), Stage()
    source.has(A, namespace="a")
    target.has(A, computed=False, namespace="b")
    assert source.gives(0, target.lacks().keys) == []


def test_what_is_not_proven_or_not_computed_is_not_given() -> None:
    source, target = Stage(), Stage()
    target.has(A, computed=False)
    keys = target.lacks().keys
    assert source.gives(0, keys) == []  # an unknown branch
    source.has(A, computed=False)
    assert source.gives(0, keys) == []
    assert source.gives(1 << 40, keys) == []
    granted = source.cache.acquire(m.Acquire(BRANCH, BRANCH, 0))
    assert isinstance(granted, m.Granted)
    source.cache.commit(m.Commit(BRANCH, len(A), final=True))
    assert source.gives(0, keys) == []


def test_what_is_here_or_on_its_way_gets_no_second_slot() -> None:
    target = Stage(host=3)
    target.has(A, computed=False)
    keys = target.lacks().keys
    assert len(keys) == 3 * KEY  # as many as there is room for
    assert -1 not in unpack(target.settle(puts=[keys]).slots[0])
    assert unpack(target.settle(puts=[keys]).slots[0]).tolist() == [-1] * 3
    target.settle(kept=[keys])
    target.settle(kept=[keys], refused=[keys])  # of a pool that was renewed
    assert unpack(target.settle(puts=[keys]).slots[0]).tolist() == [-1] * 3
    target.cache.renew(32, host_blocks=3)
    check(target.cache)


def test_a_cache_without_host_memory_takes_no_part() -> None:
    stage = Stage(host=0)
    stage.has(A)
    assert not stage.lacks().keys
    assert stage.gives(0, b"k" * KEY) == []
    assert unpack(stage.settle(puts=[b"k" * KEY]).slots[0]).tolist() == [-1]
