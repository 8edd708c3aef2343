"""Op ids: each op of a client runs once, and its replies are kept for a while.

Ids are strictly increasing per (session, client), so "was it seen?" is one comparison. Pure.
"""

from collections import OrderedDict

from ramify.actors.kit.memory import Meter, reply_bytes
from ramify.actors.session.sockets.declared import Declared
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ServerMessage


class ReplyLog:
    """The op ids and terminal replies of one client of one session, and the tools it has declared."""

    def __init__(self, limits: Limits, meter: Meter) -> None:
        self.held = 0  # bytes of `replies`
        self.last = -1  # the highest op id seen
        self.declared: Declared | None = None  # before its first `open`
        self.replies: OrderedDict[int, list[ServerMessage]] = OrderedDict()
        self._limits = limits
        self._meter = meter
        self._pending: dict[int, int] = {}  # op id -> terminal replies still to come
        self.changed: set[int] | None = (
            None  # ops with replies that a store lacks; None: all, or no store
        )

    @property
    def highest(self) -> int:
        """As `state.op` shows it: 0 before the first op."""
        return max(self.last, 0)

    @property
    def due(self) -> dict[int, int]:
        """Op id -> terminal replies still to come."""
        return self._pending

    def restore(self, last: int, due: dict[int, int], replies: dict[int, list[ServerMessage]]) -> None:
        """As it was when another server kept it."""
        self.last, self._pending = last, dict(due)
        for ident in sorted(replies):
            self.replies[ident] = replies[ident]
            self._hold(sum(map(reply_bytes, replies[ident])))

    @property
    def idle(self) -> bool:
        """Whether every op has its replies."""
        return not self._pending

    def admit(self, ids: list[int]) -> None:
        """Check that new ids increase. Raises BadRequest; nothing is recorded."""
        last = self.last
        for ident in ids:
            if ident <= self.last:
                continue  # sent again: `seen` says what happens
            if ident <= last:
                raise BadRequest(
                    f"id {ident} follows id {last}: ids must increase; the frame was refused",
                    details={"id": ident, "last": last},
                )
            last = ident

    def seen(self, ident: int) -> list[ServerMessage] | None:
        """None for a new id. Else its replies so far: none while it waits or runs.

        Raises BadRequest if it was answered too long ago.
        """
        if ident > self.last:
            return None
        if ident in self.replies:
            return self.replies[ident]
        if ident in self._pending:
            return []
        raise BadRequest(
            f"id {ident} is not new (the last was {self.last}) and its reply is no longer kept: "
            "use a higher id",
            details={"last": self.last},
        )

    def begin(self, ident: int, replies: int) -> None:
        """A new op that will get `replies` terminal replies."""
        self.last = ident
        self._pending[ident] = replies

    def waits(self, ident: int) -> bool:
        """Whether terminal replies of this op are still to come."""
        return ident in self._pending

    def record(
        self, ident: int, message: ServerMessage, *, keep: bool = True, saved: bool = True
    ) -> None:
        """A terminal reply is sent. `keep`: to be sent again; `saved`: also by a later server."""
        if keep:
            self.replies.setdefault(ident, []).append(message)
            self._hold(reply_bytes(message))
            if self.changed is not None and saved:
                self.changed.add(ident)
        left = self._pending.get(ident, 1) - 1
        if left > 0:
            self._pending[ident] = left
        else:
            self._pending.pop(ident, None)
        limits = self._limits
        while len(self.replies) > limits.replies_kept or (
            self.held > limits.replies_bytes and len(self.replies) > 1
        ):
            old, gone = self.replies.popitem(last=False)
            self._hold(-sum(map(reply_bytes, gone)))
            if self.changed is not None:
                self.changed.add(old)

    def drop(self, ident: int) -> None:
        """The op will not be answered. The client may send it again."""
        self._pending.pop(ident, None)

    def forget(self) -> None:
        """The client is not remembered any more."""
        self._meter.add(-self.held)

    def _hold(self, count: int) -> None:
        self.held += count
        self._meter.add(count)
