"""The AI SDK's `WebSocketChatTransport` on a socket: `send`, `resume` and `abort` in, chunks out.

Each request gets exactly one `end`, `error` or `no-active`. A chat's history comes with every request;
the radix tree finds what of it is computed. An answer outlives its socket, so that `resume` has all of
it.
"""

import secrets

from ramify.actors.gateway.apis.ai.chat_run import MOST_LISTENERS, ChatListener, ChatRun
from ramify.actors.gateway.apis.ai.chats import Chats
from ramify.actors.gateway.apis.ai.chunks import ChatDialogue
from ramify.actors.gateway.apis.ai.requests import Envelope, ResumeRequest, SendRequest
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.port.access.auth import bearer_header
from ramify.actors.gateway.port.dialogues.door import Line
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import BadRequest, Close, LimitExceeded, Overloaded, RamifyError

MOST_REQUESTS = 64  # of a socket, at once


class AiDoor:
    """See `Door`."""

    def __init__(self, chats: Chats[ChatRun], hub: Hub, line: Line) -> None:
        self._chats = chats
        self._hub = hub
        self._line = line
        self._requests: dict[str, tuple[ChatListener, ChatRun]] = {}
        self._stopping: str | None = None
        self._throttled = False

    @property
    def busy(self) -> bool:
        """See `Door`."""
        return bool(self._requests)

    def receive(self, message: bytes) -> bool:
        """See `Door`."""
        try:
            envelope = decode(message, Envelope)
        except RamifyError:
            return False  # it names no request that an error could be told to
        try:
            match envelope.type:
                case "send":
                    self._send(decode(message, SendRequest), len(message))
                case "resume":
                    self._resume(decode(message, ResumeRequest))
                case "abort":
                    self._abort(envelope.request_id)
        except RamifyError as error:
            if envelope.request_id in self._requests:  # the same name twice: the first one goes on
                return True
            self._answer(envelope.request_id).tell("error", errorText=error.message)
        return True

    def refuse(self, error: RamifyError) -> None:
        """See `Door`. It tells no request: which one the message was for is not known."""
        self._line.close(Close.RATE, error.message)

    def throttle(self, throttled: bool) -> None:
        """See `Door`."""
        self._throttled = throttled
        for listener, run in list(self._requests.values()):
            run.throttle(listener, throttled)

    def drain(self, reason: str) -> None:
        """See `Door`."""
        self._stopping = reason
        self._close_if_done()

    def end(self) -> None:
        """See `Door`."""
        requests, self._requests = self._requests, {}
        for listener, run in requests.values():
            run.leave(listener)

    # ---

    def _send(self, request: SendRequest, size: int) -> None:
        """Raises RamifyError."""
        credential = self._admitted(request.headers)
        if credential is None:
            return
        self._check(request.request_id)
        served = self._hub.status.model
        if request.body.model is not None and request.body.model != served:
            raise BadRequest(
                f"the model {request.body.model[:256]!r} is not served here: this server has {served!r}"
            )
        chat = (credential.name, request.id)
        before = self._chats.running(chat)
        if before is not None and before.wanted:
            raise LimitExceeded("an answer is under way in this chat: stop it, or wait for its end")
        dialogue = ChatDialogue(request, f"msg-{secrets.token_hex(12)}", self._hub.served)
        if self._line.share is not None:
            self._line.share.admit(len(dialogue.ops), self._hub.clock.now())
        run = ChatRun(self._hub, self._chats, chat, dialogue, credential, size)
        if before is not None:
            before.cancel()  # nobody who comes back can find it any more
        listener = self._listener(request.request_id, run)
        run.begin(listener)
        if self._throttled:
            run.throttle(listener, True)

    def _resume(self, request: ResumeRequest) -> None:
        """Raises RamifyError."""
        credential = self._admitted(request.headers)
        if credential is None:
            return
        self._check(request.request_id)
        chat = (credential.name, request.id)
        run = self._chats.running(chat)
        if run is None:
            answer = self._answer(request.request_id)
            transcript = self._chats.ended(chat, self._hub.clock.now())
            if transcript is None:
                answer.tell("no-active")
            else:
                answer.replay(transcript, request.last_sequence)
                answer.end()
            return
        if run.full:
            raise LimitExceeded(f"{MOST_LISTENERS} requests listen to this answer already")
        listener = self._listener(request.request_id, run)
        run.join(listener)
        if self._throttled:
            run.throttle(listener, True)

    def _abort(self, request_id: str) -> None:
        found = self._requests.get(request_id)
        if found is not None:
            _, run = found
            run.cancel()
            run.flush()

    def _check(self, request_id: str) -> None:
        """Raises RamifyError."""
        if self._stopping is not None:
            raise Overloaded(f"{self._stopping}: connect again", retry_ms=1000)
        if request_id in self._requests:
            raise BadRequest(f"the request {request_id!r} is under way: each needs an id of its own")
        if len(self._requests) >= MOST_REQUESTS:
            raise LimitExceeded(f"{MOST_REQUESTS} requests are under way on this socket: wait for one")

    def _admitted(self, headers: dict[str, str]) -> Credential | None:
        """Return the client's credential; None: its token is wrong, and the socket ends."""
        if self._line.credential is None:
            given = next(
                (value for name, value in headers.items() if name.lower() == "authorization"), None
            )
            if not self._line.admit(bearer_header(given)):
                return None
        return self._line.credential

    def _listener(self, request_id: str, run: ChatRun) -> ChatListener:
        listener = ChatListener(self._line, request_id, self._ended)
        self._requests[request_id] = (listener, run)
        return listener

    def _answer(self, request_id: str) -> ChatListener:
        """Make a listener for one answer, which no run knows yet."""
        return ChatListener(self._line, request_id, lambda _: None)

    def _ended(self, listener: ChatListener) -> None:
        self._requests.pop(listener.request_id, None)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._stopping is not None and not self.busy:
            self._line.close(Close.DRAINING, self._stopping)
