"""KV that goes along when sessions move: by pieces, as long as it pays, and never waited for in vain."""

from math import inf
from typing import Any

import pytest

from ramify.actors.cluster.moves import (
    MOST_UNDER_WAY,
    PATIENCE_SECONDS,
    PIECE_BYTES,
    PROBE,
    KvMoves,
)
from ramify.protocol.cluster import (
    KEY,
    MOST_SOUGHT,
    BlocksPut,
    BlocksRead,
    Lacking,
    PutBlocks,
    ReadBlocks,
    SeekBlocks,
    SentBlock,
)

A, B = 1, 2  # source and target
SIZE = PIECE_BYTES // 2  # of a block: two make a piece


def keys(count: int, first: int = 0) -> bytes:
    return b"".join(number.to_bytes(KEY, "big") for number in range(first, first + count))


def sent(message: ReadBlocks, count: int | None = None) -> list[SentBlock]:
    names = [message.keys[at : at + KEY] for at in range(0, len(message.keys), KEY)]
    return [SentBlock(0, name, 0) for name in names[:count]]


class Stage:
    """Two replicas that a test speaks for."""

    def __init__(self, rate: float = 0.0, room: int = 1 << 20) -> None:
        self.now = 100.0
        self.told: list[tuple[int, Any]] = []
        self.over: list[int] = []
        tell = lambda *what: self.told.append(what)  # noqa: E731
        self.moves = KvMoves(lambda: self.now, tell, lambda replica: rate)
        self.moves.joined(A, 64, SIZE)
        self.moves.joined(B, room, SIZE)

    def begin(self, session: int, *branches: int) -> bool:
        return self.moves.begin(session, A, B, list(branches), lambda: self.over.append(session))

    def took(self) -> list[Any]:
        told, self.told = self.told, []
        return [message for _, message in told]

    def lacks(self, session: int, count: int, branch: int = 7) -> None:
        self.moves.hears(session, B, Lacking(session, branch, 3, keys(count)))

    def piece(self, session: int, have: int | None = None, seconds: float = 0.0) -> None:
        """The source answers what it was asked last, and the target takes it."""
        (read,) = [each for each in self.took() if isinstance(each, ReadBlocks)]
        self.moves.hears(session, A, BlocksRead(session, read.branch, sent(read, have)))
        self.now += seconds
        self.moves.hears(session, B, BlocksPut(session, read.branch))


def test_what_is_lacking_comes_by_pieces_branch_after_branch() -> None:
    stage = Stage()
    assert stage.begin(5, 7, 8)
    assert stage.told == [(B, SeekBlocks(5, 7))]
    stage.took()
    stage.lacks(5, 3)
    (at, read) = stage.told[0]
    assert (at, read.first, len(read.keys) // KEY) == (A, 3, 2)
    stage.piece(5)
    assert [type(each) for _, each in stage.told] == [PutBlocks, ReadBlocks]
    assert stage.told[1][1].first == 5
    stage.piece(5)
    assert stage.took()[-1] == SeekBlocks(5, 8)
    assert not stage.over
    stage.lacks(5, 0, branch=8)
    assert stage.over == [5]
    assert 5 not in stage.moves
    assert stage.moves.blocks == 3


def test_a_long_branch_is_asked_for_again() -> None:
    stage = Stage()
    stage.begin(5, 7)
    stage.took()
    stage.lacks(5, MOST_SOUGHT)
    for _ in range(MOST_SOUGHT // 2):
        stage.piece(5)
    assert stage.took()[-1] == SeekBlocks(5, 7)


def test_what_the_source_has_not_ends_its_branch() -> None:
    stage = Stage()
    stage.begin(5, 7, 8)
    stage.took()
    stage.lacks(5, 6)
    stage.piece(5, have=1)
    assert stage.took()[-1] == SeekBlocks(5, 8)
    stage.lacks(5, 6, branch=8)
    stage.piece(5, have=0)
    assert stage.over == [5]


def test_no_more_comes_than_there_is_room_for() -> None:
    stage = Stage(room=3)
    stage.begin(5, 7)
    stage.took()
    stage.lacks(5, 40)
    stage.piece(5)
    stage.piece(5)
    assert stage.over == [5]
    assert stage.moves.blocks == 3


def test_few_pieces_are_under_way_and_sessions_take_turns() -> None:
    stage = Stage()
    for session in range(MOST_UNDER_WAY + 2):
        stage.begin(session, 7)
    stage.took()
    for session in range(MOST_UNDER_WAY + 2):
        stage.lacks(session, 4)
    reads = [each for each in stage.took() if isinstance(each, ReadBlocks)]
    assert [each.session for each in reads] == list(range(MOST_UNDER_WAY))
    stage.moves.hears(0, A, BlocksRead(0, 7, sent(reads[0])))
    stage.moves.hears(0, B, BlocksPut(0, 7))
    assert stage.took()[-1].session == MOST_UNDER_WAY  # before the second piece of the first
    stage.moves.gone(A)
    assert sorted(stage.over) == list(range(MOST_UNDER_WAY + 2))
    assert not [each for each in stage.took() if isinstance(each, ReadBlocks)]


def test_nothing_waits_for_who_says_nothing() -> None:
    stage = Stage()
    stage.begin(5, 7)
    stage.now += PATIENCE_SECONDS / 2
    stage.moves.look()
    assert not stage.over
    stage.lacks(5, 2)
    stage.now += 1.01 * PATIENCE_SECONDS
    stage.moves.look()
    assert stage.over == [5]
    assert stage.begin(5, 7)  # another time
    stage.moves.hears(5, A, BlocksRead(5, 7, []))  # of the first one: nobody's
    assert 5 in stage.moves
    stage.moves.gone(B)
    assert stage.over == [5, 5]
    assert not stage.begin(5, 7)


@pytest.mark.parametrize("quick", [True, False])
def test_blocks_move_as_long_as_that_is_quicker_than_computing(quick: bool) -> None:
    """The target computes 64,000 tokens a second, so a block in a millisecond."""
    stage = Stage(rate=64_000.0)
    stage.begin(5, 7)
    stage.took()
    stage.lacks(5, 2)
    stage.piece(5, seconds=0.001 if quick else 0.003)
    moved = 0
    for session in range(6, 6 + 2 * PROBE):
        stage.begin(session, 7)
        stage.took()
        stage.lacks(session, 2)
        if session in stage.moves:
            moved += 1
            stage.piece(session, seconds=0.001 if quick else 0.003)
    assert moved == (2 * PROBE if quick else 2)


def test_a_replica_without_host_memory_gives_and_takes_none() -> None:
    stage = Stage()
    assert stage.moves.token_s() == 0.0
    stage.moves.joined(3, 0, SIZE)
    assert not stage.moves.gives(3)
    assert not stage.moves.begin(5, A, 3, [7], lambda: None)
    assert not stage.moves.begin(5, 3, B, [7], lambda: None)
    assert not stage.moves.begin(5, A, B, [], lambda: None)
    stage.moves.gone(A)
    stage.moves.gone(B)
    assert stage.moves.token_s() == inf
