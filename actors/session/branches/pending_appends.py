"""What an append will put on a branch: texts, then their tokens. Data only.

A `PendingAppend` is what the template makes of an append, `Prepared` is the same with its tokens.
Neither depends on the branch's position, so branches that end alike share one: what costs time
(rendering, tokenizing) belongs to the op, not to the branch.
"""

from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec

from ramify.actors.session.branches.segments import History, Tail
from ramify.actors.tokenizer.histories import Bound
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import ChatMessage, Role


class PendingPart(msgspec.Struct, frozen=True):
    """Text that becomes one segment; see `segments.InputSegment` for the fields.

    `chat`: rendered by the template, brings its own BOS. `op`: None: the op that appends it.
    """

    text: str
    chat: bool
    tail: Tail
    role: Role | None
    messages: Sequence[ChatMessage] = ()
    turn: int = 0
    op: int | None = None
    history: History | None = None


class PendingAppend(msgspec.Struct, frozen=True):
    """An append that is decided on but not done.

    `cut`: move the branch back to there first; `over_prompt`: take the generation prompt back, which
    the branch ends with. `start`: it begins at position 0. `after`: the token that it stands behind,
    where that matters. `least`: its tokens are at least so many.
    """

    parts: list[PendingPart]
    start: bool
    after: int | None = None
    cut: int | None = None
    over_prompt: bool = False
    tokens: Sequence[int] | None = None  # given as tokens: nothing to encode
    least: int = 0  # not counted yet


class PartTokens(NamedTuple):
    """Tokens of one part; every branch that gets them holds the same two objects."""

    tokens: "array[int]"
    packed: bytes


class Prepared(msgspec.Struct, frozen=True):
    """`encoded`: the tokens of each part; None if they certainly need more than the room there was.

    `tokenized`: how many of them were made of text. `bound`: what was known of the first part.
    """

    pending: PendingAppend
    encoded: list[PartTokens] | None
    tokenized: int = 0
    bound: Bound | None = None


class Shared:
    """What the branches of one `append` share, by what they end with (`BranchWriter.situation`).

    `tickets`: what is being prepared off the event loop.
    """

    __slots__ = ("prepared", "tickets")

    def __init__(self) -> None:
        self.prepared: dict[Hashable, Prepared | RamifyError] = {}
        self.tickets: dict[Hashable, int] = {}


class Joined(NamedTuple):
    """Texts behind a branch, tokenized together with its end: all begin at position `at`.

    `own`, `tail`: the branch's own tokens and text from there on. All of them begin with that text.
    """

    at: int
    own: "array[int]"
    tail: str
    tokens: "list[array[int]]"
