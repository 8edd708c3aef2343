"""Commands to other actors, collected while a session handles its mailbox.

The actor sends them when it has read its mailbox: first to sockets, then to the cache, then to the
grammar actor and the scheduler. A request may name a branch that the cache has just been told of, so
the cache comes first.
"""

from collections.abc import Callable

import msgspec

from ramify.protocol.messages import (
    Abandon,
    CancelRequest,
    Compile,
    DropBranches,
    ExtendBranch,
    ForkBranch,
    Inspect,
    MoveBranch,
    OpenBranch,
    Reopen,
    RetainBranches,
    Submit,
)
from ramify.protocol.wire import Error, ServerMessage

Made = object  # by `EncodeText.run`: input, choices or a prompt, as the one who asked for it knows
ToCache = (
    OpenBranch
    | ExtendBranch
    | ForkBranch
    | MoveBranch
    | RetainBranches
    | DropBranches
    | Reopen
    | Inspect
)
ToScheduler = Submit | CancelRequest
ToGrammar = Compile | Abandon


class EncodeText(msgspec.Struct, frozen=True):
    """Render and tokenize long text off the event loop: `run`. Answered with `Encoded`."""

    ticket: int
    size: int  # characters, about
    run: Callable[[], Made]


class Encoded(msgspec.Struct, frozen=True):
    """What the `run` of an `EncodeText` returned, or why it could not."""

    ticket: int
    prepared: Made | None
    error: BaseException | None = None


class Outbox:
    """Commands to other actors, in order. The actor takes and clears them."""

    def __init__(self) -> None:
        self.cache: list[ToCache] = []
        self.retained: dict[int, float] = {}  # handle -> until, told after `cache`
        self.scheduler: list[ToScheduler] = []
        self.grammar: list[ToGrammar] = []
        self.notes: list[tuple[int, ServerMessage]] = []  # to sockets that are not attached
        self.refused: list[tuple[int, Error]] = []  # sockets that are turned away, and why
        self.closes: list[tuple[int, int, str]] = []  # socket, code, reason
        self.encode: list[EncodeText] = []
        self.wake_at: float | None = None

    def forget(self) -> None:
        """Cache, scheduler and grammar are gone: drop what is for them. Replies still go out."""
        self.forget_engine()
        self.encode.clear()
        self.wake_at = None

    def forget_engine(self) -> None:
        """Others take the place of cache, scheduler and grammar: they are told everything anew."""
        for commands in (self.cache, self.retained, self.scheduler, self.grammar):
            commands.clear()

    def seal(self, owner: str = "") -> None:
        """Make one message of all that is retained, behind those that make, move or drop branches."""
        if self.retained:
            self.cache.append(RetainBranches(self.retained, owner))
            self.retained = {}

    def wake(self, when: float) -> None:
        """Ask for a `Tick` at `when` or earlier."""
        self.wake_at = when if self.wake_at is None else min(when, self.wake_at)
