"""Blocks that have left the device: found by their tokens alone, pinned, dropped, the oldest first."""

from ramify.actors.cache.cache import RadixCache
from ramify.protocol import messages as m
from ramify.protocol.plan import MovedBlock, pack, unpack
from tests.actors.cache.integrity import check

A, B = list(range(100, 110)), list(range(200, 210))


class Stage:
    """A cache of 12 pages, whose blocks have 4 tokens."""

    def __init__(self, host: int = 8) -> None:
        self.cache = RadixCache(12, 1, 64, 4, host_blocks=host)
        self.count = 0
        self.stored = self.cache.residency.stored

    def ask(self, tokens: list[int], namespace: str = "", load: bool = True) -> m.Granted:
        self.count += 1
        branch = self.count << 32 | 1
        self.cache.open_branch(m.OpenBranch(branch, namespace))
        self.cache.extend_branch(m.ExtendBranch(branch, pack(tokens)))
        (verdict,) = self.cache.settle(
            m.Settle([], [], [m.Acquire(branch, branch, 0, load=load)])
        ).verdicts
        check(self.cache)
        assert isinstance(verdict, m.Granted)
        return verdict

    def end(self, granted: m.Granted, computed: int, **more: object) -> None:
        finite = more.pop("finite", True)
        commit = m.Commit(granted.request, computed, final=True, finite=finite, **more)  # type: ignore
        self.cache.commit(commit)
        self.cache.drop_branches(m.DropBranches([granted.request]))
        check(self.cache)

    def turn(self, tokens: list[int], **more: object) -> m.Granted:
        granted = self.ask(tokens, **more)  # type: ignore[arg-type]
        self.end(granted, len(tokens))
        return granted


def test_a_prompt_finds_what_was_evicted_though_its_branch_is_gone() -> None:
    stage = Stage()
    stage.turn(A)
    stage.turn(B)
    again = stage.ask(A)
    assert (again.cached, again.loaded) == (8, 6)  # two tokens are on the device
    assert [len(unpack(block.pages)) for block in again.loads] == [4, 4]
    first = unpack(again.pages).tolist()
    loaded = [page for block in again.loads for page in unpack(block.pages)]
    assert loaded == [-1, -1, *first[2:8]]
    assert not again.proven
    stage.end(again, 10)


def test_another_namespace_finds_nothing() -> None:
    stage = Stage()
    stage.turn(A)
    stage.turn(B)
    assert stage.turn(A, namespace="other").cached == 0
    assert stage.turn([*A[:4], 7, 7, 7, 7, 7]).loaded > 0
    assert stage.turn(A[1:]).cached == 0


def test_who_is_not_to_load_computes() -> None:
    stage = Stage()
    stage.turn(A)
    stage.turn(B)
    assert stage.turn(A, load=False).loads == []


def test_kv_without_finite_logits_behind_it_is_not_saved() -> None:
    stage = Stage()
    stage.end(stage.ask(A), 10, finite=None)
    stage.turn(B)
    assert len(stage.stored) == 0


def test_lost_blocks_are_forgotten_and_their_slots_used_again() -> None:
    stage = Stage()
    stage.turn(A)
    stage.turn(B)
    again = stage.ask(A)
    stage.end(again, again.cached - again.loaded, finite=None, lost=[again.loads[1].key])
    once_more = stage.ask(A)
    assert once_more.loaded > 0
    assert [block.key for block in once_more.loads] == [again.loads[0].key]
    stage.end(once_more, 10)


def test_blocks_behind_logits_that_are_not_finite_are_forgotten() -> None:
    stage = Stage()
    stage.turn(A)
    stage.turn(B)
    stage.end(stage.ask(A), 0, finite=False)
    assert stage.turn(A).loads == []


def test_a_pinned_slot_is_not_written_and_the_deepest_goes_first() -> None:
    stage = Stage(host=2)
    stage.turn(A)
    stage.turn(B)  # saves both blocks of A
    again = stage.ask(A)  # evicts B, for which there is no slot
    assert {block.slot for block in again.loads} == {0, 1}
    stage.end(again, 10)
    stage.turn(B)
    stage.turn([1] * 10)  # saves B over A
    assert stage.ask(A[:9]).loads == []


def test_what_is_stored_already_is_not_copied_again() -> None:
    stage = Stage()
    for tokens in (A, B):
        stage.turn(tokens)
    saves: list[MovedBlock] = []
    for tokens in (A, B, A, B):
        self = stage.ask(tokens)
        saves += stage.stored.saves
        stage.end(self, 10)
    assert len(stage.stored) == 4


def test_what_goes_next_is_saved_ahead_and_then_goes_without_a_copy() -> None:
    stage = Stage()
    stage.turn(A)
    settled = stage.cache.settle(m.Settle([], [], []))  # two of twelve pages are free
    check(stage.cache)
    assert [len(unpack(block.pages)) for block in settled.saves] == [4, 4]
    assert not stage.cache.settle(m.Settle([], [], [])).saves
    granted = stage.ask(B)
    assert not stage.stored.saves
    stage.end(granted, 10)
    assert stage.ask(A).loaded > 0


def test_nothing_is_saved_ahead_while_there_is_room() -> None:
    stage = Stage()
    stage.turn(A[:8])
    assert not stage.cache.settle(m.Settle([], [], [])).saves


def test_a_block_from_elsewhere_is_found_when_it_has_arrived() -> None:
    stage = Stage(host=2)
    stage.turn(A)
    stage.turn(B)
    (first, _), (second, _) = [(key, slot) for key, slot, _ in stage.stored.held()]
    other = Stage(host=2)
    slots = [other.stored.reserve(key) for key in (first, second)]
    assert sorted(slots) == [0, 1]
    assert other.stored.reserve(first) is None
    assert other.stored.reserve(b"x" * 16) is None  # both slots are being filled
    assert other.turn(A).loads == []
    other.stored.arrived(first, whole=True)
    other.stored.arrived(second, whole=False)
    check(other.cache)
    assert (other.stored.place(first), other.stored.place(second)) == (slots[0], None)
