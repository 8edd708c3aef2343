"""A dialogue and the session that answers it, from the first op to the last byte.

It is a `Socket` of the hub with a number of its own. Subclasses know where the answer goes.
"""

from abc import ABC, abstractmethod

from ramify.actors.gateway.port.binding import SessionBinding, Stage
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue, naming
from ramify.actors.gateway.port.http import Response
from ramify.actors.gateway.port.hub import Hub
from ramify.actors.kit.log import get_log
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import Close, NoSession, Overloaded, RamifyError
from ramify.protocol.wire import Bye, CloseSession, Error, ServerMessage

_LOG = get_log("ramify.gateway")

CLOSING_ID = 2000  # of the op that ends the session
LATE_RETRY_MS = 1000  # when a request may come again that no session has answered


class DialogueRun(ABC):
    """Runs a dialogue with its session. `number`: the socket's. `size`: of the request, in bytes."""

    def __init__(
        self, hub: Hub, number: int, dialogue: Dialogue, credential: Credential, size: int
    ) -> None:
        self.id = number
        self._hub = hub
        self._dialogue = dialogue
        self._credential = credential
        self._over = False  # the dialogue
        self._binding = SessionBinding(hub, number)
        self._binding.credential = credential
        self._binding.displaceable = dialogue.keeps  # nobody closes it
        self._binding.saves = dialogue.saves
        self._binding.binds = True
        self._size = size

    def start(self) -> None:
        """Send the ops."""
        self._hub.connections[self.id] = self
        self._reply(self._binding.route(self._dialogue.ops, self._size))
        self.flush()

    # --- from the actor -----------------------------------------------------------------------

    @property
    def websocket(self) -> bool:
        return False

    @property
    def attached(self) -> bool:
        """True while a session is to answer."""
        return self._binding.stage in (Stage.OPENING, Stage.ATTACHED)

    def opened(self, session: int) -> None:
        """Note which session the directory has found."""
        self._reply(self._binding.opened(session))

    def refused(self, error: Error) -> None:
        """Note that directory or session refused the request."""
        if self._binding.stage is Stage.ATTACHED:
            self._binding.failed(error)
        self._reply([error])

    def retry(self) -> None:
        """Tell the waiting ops again: the session may have room."""
        self._reply(self._binding.retry())
        self.flush()

    @abstractmethod
    def deliver(self, messages: list[ServerMessage]) -> bool:
        """Queue what the dialogue makes of `messages`. True if something is to be flushed."""

    @abstractmethod
    def flush(self) -> None:
        """Write what was queued."""

    def abort(self) -> None:
        """End it now; nothing more is sent."""
        self._over = True
        self._leave()

    def on_timer(self, now: float) -> None:
        """Check the deadlines."""
        late = None if self._over else self._binding.late(now)
        if late is not None:
            self._end(Overloaded(late[1], retry_ms=LATE_RETRY_MS))
            self.flush()

    def close(self, code: int, reason: str) -> None:
        """End the dialogue: the session is gone, or the server stops."""
        if not self._over:
            self._end(NoSession(reason) if code == Close.DONE else Overloaded(reason))
        self.flush()

    def recheck(self) -> None:
        """Check whether this request's token is still accepted: the tokens have changed."""
        tokens = self._hub.tokens
        if tokens.required and tokens.current(self._credential) is None:
            self.close(Close.UNAUTHORIZED, "the token was withdrawn")

    # --- for subclasses -----------------------------------------------------------------------

    @abstractmethod
    def _queue(self, made: bytes | Response | None) -> None:
        """Queue bytes of the dialogue for the client; they go with the next `flush`."""

    @abstractmethod
    def _ended(self) -> None:
        """Note that the dialogue is over, and all that it says is queued. Called once."""

    def _leave(self) -> None:
        """Give back what it holds of the gateway. May be called again."""
        self._binding.end()
        self._hub.timers.forget(self.id)
        self._hub.connections.pop(self.id, None)

    def _reply(self, messages: list[ServerMessage]) -> None:
        if self._over or not messages or type(messages[0]) is Bye:  # the gateway says it, alone
            return
        self._binding.answer_by = None
        if pictures := self._dialogue.pictures:
            messages = [naming(message, pictures) for message in messages]
        try:
            made = self._dialogue.receive(messages)
        except Exception:
            _LOG.exception("request %d: a bug in the gateway", self.id)
            self._end(RamifyError("internal error"))
            return
        self._queue(made)
        more = self._dialogue.take_ops()
        if more:
            self._reply(self._binding.route(more, 0))
        if self._dialogue.over:
            self._ends()

    def _end(self, error: RamifyError) -> None:
        self._queue(self._dialogue.fail(error))
        self._ends()

    def _ends(self) -> None:
        """End the session with the dialogue if nobody comes back to it."""
        if self._over:
            return
        self._over = True
        self._ended()
        if self._binding.stage is Stage.ATTACHED and not self._dialogue.keeps:
            self._binding.route([CloseSession(id=CLOSING_ID)], 0)
