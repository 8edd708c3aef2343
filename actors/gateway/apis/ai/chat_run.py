"""An answer under way, and the requests that listen to it. It goes on for a while when nobody does."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ramify.actors.gateway.apis.ai.chats import Chat, Chats
from ramify.actors.gateway.apis.ai.chunks import BRANCH, ChatDialogue, ChatTranscript
from ramify.actors.gateway.port.dialogues.dialogue_run import DialogueRun
from ramify.actors.gateway.port.dialogues.door import Line
from ramify.actors.gateway.port.http import Response
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.credentials import Credential
from ramify.protocol.wire import Cancel, JsonObject, ServerMessage

ALONE_S = 120.0  # that an answer goes on without anybody who listens
MOST_LISTENERS = 8
CANCEL = 1000  # id of the op


@dataclass(eq=False, slots=True)
class ChatListener:
    """A request on a socket that gets the chunks. `ended` is called once, when it has had its end."""

    line: Line
    request_id: str
    ended: "Callable[[ChatListener], None]"
    sequence: int = 0
    throttled: bool = False

    def chunk(self, chunk: JsonObject) -> None:
        """Send a chunk."""
        self.tell("chunk", sequence=self.sequence, chunk=chunk)
        self.sequence += 1

    def replay(self, transcript: ChatTranscript, beyond: int | None = None) -> None:
        """Confirm a resume, and send what was said behind chunk number `beyond`."""
        self.tell("start")
        for chunk in transcript.chunks():
            if beyond is None or self.sequence > beyond:
                self.chunk(chunk)
            else:
                self.sequence += 1

    def tell(self, kind: str, **fields: object) -> None:
        """Queue a frame."""
        message = {"type": kind, "requestId": self.request_id, **fields}
        self.line.write(self.line.frame(msgspec.json.encode(message)))

    def end(self, error: str | None = None) -> None:
        """Send the end of the request, once."""
        if error is None:
            self.tell("end")
        else:
            self.tell("error", errorText=error)
        self.ended(self)


class ChatRun(DialogueRun):
    """An answer under way, with its listeners. The slowest of them sets the pace."""

    def __init__(
        self,
        hub: Hub,
        chats: "Chats[ChatRun]",
        chat: Chat,
        dialogue: ChatDialogue,
        credential: Credential,
        size: int,
    ) -> None:
        super().__init__(hub, next(hub.ids), dialogue, credential, size)
        self._chats = chats
        self._chat = chat
        self._said = dialogue
        self._transcript = ChatTranscript()
        self._listeners: list[ChatListener] = []
        self._lines: list[Line] = []  # that were written to
        self._alone_until = 0.0
        self._cancelled = False

    @property
    def wanted(self) -> bool:
        """Whether anybody listens, and it was not stopped: then the chat has to wait for its end."""
        return bool(self._listeners) and not self._cancelled

    @property
    def full(self) -> bool:
        """Whether it has as many listeners as it may have."""
        return len(self._listeners) >= MOST_LISTENERS

    def begin(self, listener: ChatListener) -> None:
        """Ask the session. `listener` gets the whole answer."""
        self._listeners.append(listener)
        self._chats.begin(self._chat, self)
        self.start()

    def join(self, listener: ChatListener) -> None:
        """Add a listener: it gets the transcript, then what follows."""
        listener.replay(self._transcript)
        self._listeners.append(listener)
        self._hub.timers.forget(self.id)
        self._binding.late(self._hub.clock.now())  # nobody may have answered `open` yet

    def leave(self, listener: ChatListener) -> None:
        """Forget a listener that is gone."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._pace()
            if not self._listeners and not self._over:
                self._alone_until = self._hub.clock.now() + ALONE_S
                self._hub.timers.schedule(self.id, self._alone_until)

    def cancel(self) -> None:
        """Stop the generation. The run ends with it."""
        self._cancelled = True
        if not self._over:
            self._reply(self._binding.route([Cancel(id=CANCEL, branch=BRANCH)], 0))

    def throttle(self, listener: ChatListener, throttled: bool) -> None:
        """Note that a listener reads too slowly, or reads again."""
        listener.throttled = throttled
        self._pace()

    # --- see `DialogueRun` --------------------------------------------------------------------

    def deliver(self, messages: list[ServerMessage]) -> bool:
        self._reply(messages)
        self._publish()
        return bool(self._lines)

    def flush(self) -> None:
        self._publish()
        lines, self._lines = self._lines, []
        for line in lines:
            line.flush()

    def on_timer(self, now: float) -> None:
        super().on_timer(now)
        if not self._listeners and not self._over:
            if now >= self._alone_until:
                self.cancel()
            else:
                self._hub.timers.schedule(self.id, self._alone_until)

    def _queue(self, made: bytes | Response | None) -> None:
        """Do nothing: chunks are taken from the dialogue."""

    def _ended(self) -> None:
        self._publish()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.end(self._said.error)
        self._lines += [listener.line for listener in listeners]
        kept = self._transcript if self._said.error is None else None
        self._chats.end(self._chat, self, kept, self._hub.clock.now())

    def _ends(self) -> None:
        super()._ends()
        self._leave()

    def _leave(self) -> None:
        super()._leave()
        self._chats.end(self._chat, self, None, self._hub.clock.now())

    # ---

    def _publish(self) -> None:
        fresh = self._said.take()
        for chunk in fresh:
            self._transcript.add(chunk)
            for listener in self._listeners:
                listener.chunk(chunk)
        if fresh:
            self._lines += [listener.line for listener in self._listeners]

    def _pace(self) -> None:
        self._binding.throttle(any(listener.throttled for listener in self._listeners))
