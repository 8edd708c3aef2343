"""A request on a WebSocket that carries several: its dialogue, and where the answer goes.

Flow control is the socket's: its door throttles all its channels together.
"""

from collections.abc import Callable, Sequence

from ramify.actors.gateway.port.binding import Stage
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.dialogues.dialogue_run import DialogueRun
from ramify.actors.gateway.port.dialogues.door import Line
from ramify.actors.gateway.port.http import Response
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.credentials import Credential
from ramify.protocol.wire import ClientMessage, ServerMessage


class Channel(DialogueRun):
    """A request on a WebSocket that carries several.

    What the dialogue says as bytes are frames (`Line.frame`), written as they are; a `Response`, which
    is an error before anything was said, goes to `refused_with`. `ended` is called once, when the
    dialogue is over. `lingers`: it stays attached to its session then, until `release`.
    """

    def __init__(
        self,
        hub: Hub,
        line: Line,
        dialogue: Dialogue,
        credential: Credential,
        size: int,
        refused_with: Callable[[Response], None],
        ended: "Callable[[Channel], None]",
        *,
        lingers: bool = False,
    ) -> None:
        super().__init__(hub, next(hub.ids), dialogue, credential, size)
        self._line = line
        self._released = False
        self._refused_with = refused_with
        self._tell_ended = ended
        self._lingers = lingers
        self._queued = False

    @property
    def over(self) -> bool:
        """True when the dialogue has ended."""
        return self._over

    def send(self, ops: list[ClientMessage]) -> None:
        """Send more ops to the session, while the dialogue runs."""
        if not self._over:
            self._reply(self._binding.route(ops, 0))

    def throttle(self, throttled: bool) -> None:
        """See `Door`."""
        self._binding.throttle(throttled)

    def release(self, ops: Sequence[ClientMessage] = ()) -> None:
        """Leave the session: the socket is gone, or nobody comes back. What runs is cancelled, unless
        the dialogue outlives its client. `ops`: the last ops for the session. May be called again."""
        self._released = True
        if self._over or not self._dialogue.outlives:
            last = list(ops) if self._over else self._dialogue.abandon()
            if last and self._binding.stage is Stage.ATTACHED:
                self._binding.route(last, 0)
            self.abort()
        else:
            self._lingers = False
            self._binding.throttle(False)

    # --- see `DialogueRun` --------------------------------------------------------------------

    def deliver(self, messages: list[ServerMessage]) -> bool:
        self._queued = False
        self._reply(messages)
        return self._queued

    def flush(self) -> None:
        self._line.flush()

    def _queue(self, made: bytes | Response | None) -> None:
        if made is None or self._released:
            return
        self._queued = True
        if isinstance(made, Response):
            self._refused_with(made)
        else:
            self._line.write(made)

    def _ended(self) -> None:
        self._hub.timers.forget(self.id)
        self._tell_ended(self)

    def _ends(self) -> None:
        super()._ends()
        if not self._lingers:
            self._leave()
