"""KV that goes with sessions from one replica to another. Pure.

A session that leaves a replica which lives (*source*) and was placed at another one (*target*) is told
there with its branches. Then, branch by branch, the target says which blocks it lacks, they are read
from the source and put to the target, a piece at a time (`protocol/cluster.py`). What the session wants
to run waits until that is over; so its requests find the blocks as they find all in host memory.

A model with fixed states or windows can do nothing with blocks alone. So the source is asked first for a
snapshot behind the position at which the target can begin, and its parts follow the blocks before it.

It is over early where it does not pay (the pace of pieces and that of prompts are measured), where the
source has no more of them, says nothing for a while, or goes. Then the rest is computed.

Does not know sessions' messages, nor who is placed where.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from ramify.protocol.cluster import (
    BLOCK,
    KEY,
    MOST_SOUGHT,
    BlocksPut,
    BlocksRead,
    Lacking,
    MoveAnswer,
    PutBlocks,
    ReadBlocks,
    SeekBlocks,
)

PIECE_BYTES = 4 << 20  # of one message, but for a block that is larger
SHARED_BYTES = 16 << 20  # of a piece that is no message: a step on a CPU saves it, in some 10 ms
DEVICE_BYTES = 128 << 20  # of one that a GPU saves, in some 3 ms
MOST_UNDER_WAY = 4  # pieces of all sessions
MOST_BRANCHES = 64  # of a session that are asked for
PATIENCE_SECONDS = 5.0  # without an answer: a replica for prompts has long steps
PROBE = 16  # one move in so many is made although it does not seem to pay
_FORGET = 8  # pieces until a pace is half forgotten, about

ToMove = SeekBlocks | ReadBlocks | PutBlocks


@dataclass(slots=True, eq=False, repr=False)
class Move:
    """Of one session. `done()` is called when it is over."""

    source: int
    target: int
    branches: deque[int]
    left: int  # blocks that the target has room for
    done: Callable[[], None]
    first: int = 0  # of those that are to be asked for, the index in its branch
    keys: bytes = b""
    asked: int = 0  # blocks of the piece that is under way
    more: bool = False  # the branch may lack blocks behind these
    since: float = 0.0  # of the last word
    pays: bool | None = None
    seeks: Lacking | None = None  # the target's answer, while the source looks for a snapshot
    note: bytes = b""  # of the snapshot that is moved


class KvMoves:
    """The moves of a front. `tell(replica, message)` never fails; `rate(replica)`: prompt tokens a
    second, 0.0: unknown. `shared`: all replicas are processes of this machine.
    """

    def __init__(
        self,
        now: Callable[[], float],
        tell: Callable[[int, ToMove], None],
        rate: Callable[[int], float],
        *,
        shared: bool = False,
    ) -> None:
        self._now = now
        self._tell = tell
        self._rate = rate
        self._shared = shared
        # replica -> blocks in host memory, bytes of one, blocks of a piece
        self._sizes: dict[int, tuple[int, int, int]] = {}
        self._stalled: set[int] = set()
        self._moves: dict[int, Move] = {}  # by session
        self._under_way: dict[int, float] = {}  # sessions with a piece, and since when
        self._waiting: deque[int] = deque()  # sessions that are to ask for their next piece
        self._last = 0.0  # when the last piece was there
        self.byte_s = 0.0  # of one byte; 0.0: unknown
        self._learnt = 0.0, 0.0  # seconds and bytes of the last pieces
        self.blocks = 0  # that were moved
        self.seconds = 0.0  # in which some were under way
        self._probes = 0

    def __contains__(self, session: int) -> bool:
        return session in self._moves

    def token_s(self) -> float:
        """Seconds until the KV of a token has moved; 0.0: unknown, infinite: none moves."""
        size = max((size for _, size, _ in self._sizes.values()), default=0)
        return self.byte_s * size / BLOCK if size else inf

    def __len__(self) -> int:
        return len(self._moves)

    def joined(self, replica: int, blocks: int, block_bytes: int, device: str = "cpu") -> None:
        """A replica with room for `blocks` in host memory; without any it neither gives nor takes."""
        if blocks:
            most = DEVICE_BYTES if device.startswith("cuda") else SHARED_BYTES
            piece = (most if self._shared else PIECE_BYTES) // block_bytes
            self._sizes[replica] = blocks, block_bytes, max(1, piece)

    def gives(self, replica: int) -> bool:
        """Whether sessions that leave `replica` may take KV along."""
        return replica in self._sizes and replica not in self._stalled

    def stalls(self, replica: int, stalled: bool) -> None:
        """Its executor makes no progress, or goes on."""
        if not stalled:
            self._stalled.discard(replica)
            return
        self._stalled.add(replica)
        self._end_all(replica)

    def begin(
        self, session: int, source: int, target: int, branches: list[int], done: Callable[[], None]
    ) -> bool:
        """Move KV of these branches. False: there is none to move, or no room."""
        if not branches or not self.gives(source) or not self.gives(target):
            return False
        move = Move(source, target, deque(branches[:MOST_BRANCHES]), self._sizes[target][0], done)
        self._moves[session] = move
        self._seek(session, move)
        return True

    def hears(self, session: int, replica: int, message: MoveAnswer) -> None:
        """A replica answers. What is of no move, or of an earlier one, is nobody's."""
        move = self._moves.get(session)
        if move is None or not move.branches or message.branch != move.branches[0]:
            return
        move.since = self._now()
        match message:
            case Lacking() if replica == move.target and not move.asked and move.seeks is None:
                if message.resumes is None:
                    self._lacks(session, move, message.first, message.keys)
                else:
                    move.seeks = message
                    self._tell(move.source, SeekBlocks(session, message.branch, message.resumes))
            case Lacking() if replica == move.source and move.seeks is not None:
                lacking, move.seeks = move.seeks, None
                self._found(session, move, lacking, message)
            case BlocksRead(blocks=blocks) if replica == move.source and move.asked:
                if len(blocks) < move.asked:  # what follows is not there, either
                    move.keys, move.more, move.asked = b"", False, len(blocks)
                if blocks:
                    self._tell(move.target, PutBlocks(session, message.branch, message, move.note))
                else:
                    self._landed(session)
                    self._next_branch(session, move)
            case BlocksPut() if replica == move.target and move.asked:
                self._put(session, move)

    def end(self, session: int) -> None:
        """The move is over, whatever is under way."""
        move = self._moves.pop(session, None)
        if move is not None:
            self._landed(session)
            move.done()

    def gone(self, replica: int) -> None:
        """A replica is gone: what goes on there ends."""
        self._sizes.pop(replica, None)
        self._stalled.discard(replica)
        self._end_all(replica)

    def _end_all(self, replica: int) -> None:
        for session, move in list(self._moves.items()):
            if replica in (move.source, move.target):
                self.end(session)

    def look(self) -> None:
        """End what waits for too long."""
        late = self._now() - PATIENCE_SECONDS
        for session, move in list(self._moves.items()):
            if move.since < late and session not in self._waiting:
                self.end(session)

    # --- steps of a move -------------------------------------------------------------------------

    def _seek(self, session: int, move: Move) -> None:
        move.since, move.asked, move.seeks, move.note = self._now(), 0, None, b""
        self._tell(move.target, SeekBlocks(session, move.branches[0]))

    def _next_branch(self, session: int, move: Move) -> None:
        move.branches.popleft()
        if move.branches:
            self._seek(session, move)
        else:
            self.end(session)

    def _lacks(self, session: int, move: Move, first: int, keys: bytes) -> None:
        count = min(len(keys) // KEY, move.left)
        if not count:
            self._next_branch(session, move)
            return
        if move.pays is None:
            move.pays = self._pays(move, 1, BLOCK)
        if not move.pays:
            self.end(session)
            return
        self._fetch(session, move, first, keys[: count * KEY], more=count == MOST_SOUGHT)

    def _found(self, session: int, move: Move, lacking: Lacking, snapshot: Lacking) -> None:
        """The source has a `snapshot` behind where the target can begin, or none."""
        need = max(0, snapshot.first // BLOCK - lacking.first)
        more = need > MOST_SOUGHT  # then its parts come another time
        keys = lacking.keys[: need * KEY]
        if not more:
            keys += snapshot.keys
            move.note = snapshot.note
        count, gain = len(keys) // KEY, snapshot.first - (lacking.resumes or 0)
        if not snapshot.keys or count > move.left or not self._pays(move, count, gain):
            self._next_branch(session, move)
            return
        self._fetch(session, move, lacking.first, keys, more=more)

    def _fetch(self, session: int, move: Move, first: int, keys: bytes, *, more: bool) -> None:
        move.first, move.keys, move.more = first, keys, more
        self._waiting.append(session)
        self._go_on()

    def _pays(self, move: Move, blocks: int, tokens: int) -> bool:
        """Whether so many blocks come sooner than so many tokens are computed."""
        size = self._sizes[move.source][1]
        if self.byte_s * size * blocks * self._rate(move.target) < tokens:
            return True
        self._probes += 1
        return self._probes % PROBE == 0

    def _go_on(self) -> None:
        """Ask for pieces, by turns, as long as there may be more under way."""
        while self._waiting and len(self._under_way) < MOST_UNDER_WAY:
            session = self._waiting.popleft()
            move = self._moves.get(session)
            if move is None or session in self._under_way or not self.gives(move.source):
                continue
            size = self._sizes[move.source][2] * KEY
            keys, move.keys = move.keys[:size], move.keys[size:]
            move.asked = len(keys) // KEY
            move.since = self._under_way[session] = self._now()
            read = ReadBlocks(session, move.branches[0], move.first, keys, self._shared)
            self._tell(move.source, read)
            move.first += move.asked

    def _put(self, session: int, move: Move) -> None:
        """A piece is there."""
        now = self._now()
        seconds = now - max(self._last, self._under_way[session])
        keep = 1 - 1 / _FORGET
        size = move.asked * self._sizes[move.source][1]
        self._learnt = self._learnt[0] * keep + seconds, self._learnt[1] * keep + size
        self.byte_s = self._learnt[0] / self._learnt[1]  # small pieces tell little
        self._last = now
        self.seconds += seconds
        self.blocks += move.asked
        move.left -= move.asked
        move.asked = 0
        self._landed(session)
        if move.keys and move.left:
            self._waiting.append(session)
            self._go_on()
        elif move.left and move.more:
            self._seek(session, move)
        else:
            self._next_branch(session, move)

    def _landed(self, session: int) -> None:
        if self._under_way.pop(session, None) is not None:
            self._go_on()
