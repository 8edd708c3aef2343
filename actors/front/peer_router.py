"""The addresses inside a gateway process. Messages for another process (a peer) go there.

A client may resume a session on any connection, and the kernel chose the connection's process. So
the gateway of process B may hold a socket whose session lives in process A. All that they tell each
other then travels unchanged, addressed by number, in one frame for each peer and
turn of the loop. Frames of clients keep their limits: a session with too much to do refuses them.

    B's gateway --OpenSession, Frame, Detached ...--> A's directory and session
    A's session --Opened, Deliver, CloseSocket-----> B's gateway

When a peer is gone, its sessions' sockets here are closed, and its sockets are detached from
the sessions here. A process that has just taken another one's place accepts sockets before it has
heard who its peers are; until then, sockets that want a session elsewhere wait.

This file does not know links: it is given a function that forwards bytes.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

from ramify.actors.front.gateway_messages import (
    MAX_WORKERS,
    PeerMessage,
    PeerMessages,
    ToSession,
    home,
    worker_of,
)
from ramify.actors.front.interface import OPENS, Mailboxes
from ramify.actors.gateway.port.intake import refuse
from ramify.actors.kit.fanout import FanOut, Router
from ramify.actors.kit.mailbox import Address, FunctionAddress, MailboxFull, tell_each
from ramify.actors.kit.relay import Relay
from ramify.actors.links.bundle import FRAME_BYTES, LARGEST, EncodedBatch
from ramify.actors.processes.messages import decoder, encoder
from ramify.protocol.errors import Close, Overloaded
from ramify.protocol.messages import (
    CloseSocket,
    Deliver,
    Detached,
    DirectoryMessage,
    Drained,
    Frame,
    GatewayMessage,
    Opened,
    OpenRefused,
    OpenSession,
    SessionMessage,
    Throttled,
)
from ramify.protocol.wire import Error

RETRY_MS = 100
BUSY = Overloaded("the server is behind: send the frame again later", retry_ms=RETRY_MS)


class PeerRouter(Mailboxes):
    """The `Mailboxes` of gateway worker `worker` (its number).

    `forward(worker, body)` brings bytes to a peer's `receive`, unless it raises MailboxFull;
    `behind()`: so much waits on that way that frames of clients have to be refused. `most`: refusals
    of one frame. `told`: called when sessions have taken all that was put into `fan_out`. `workers`: how
    many there are, if a store outlives them; else 0.
    """

    def __init__(
        self,
        worker: int,
        forward: Callable[[int, bytes], None],
        most: int,
        told: Callable[[], None] = lambda: None,
        behind: Callable[[], bool] = lambda: False,
        workers: int = 0,
    ) -> None:
        super().__init__()
        self._workers = workers
        self.worker = worker
        self.sessions = _SessionRouter(self)
        self.fan_out: FanOut[SessionMessage] = FanOut(self.sessions, emptied=told)
        self._gateway = FunctionAddress(self._to_gateway)
        self._directory = FunctionAddress(self._to_directory)
        self._forward = forward
        self._behind = behind
        self._most = most
        self._encoder = encoder()
        self._decode = decoder(PeerMessages).decode
        self._loop = asyncio.get_running_loop()
        self._arrived: Relay[GatewayMessage] = Relay()  # peers cannot be told to wait
        self._arrived.connect(self.to_gateway)
        self._peers: set[int] = set()
        self._early: list[OpenSession] | None = []  # wait for the first `peers`; None: it has come
        self._waiting: dict[int, deque[EncodedBatch]] = {}  # by peer
        self._remote_sessions: dict[int, int] = {}  # our socket -> the worker that its session lives in
        self._remote_sockets: dict[int, int] = {}  # a peer's socket -> the session here

    @property
    def gateway(self) -> Address[GatewayMessage]:
        return self._gateway

    @property
    def directory(self) -> Address[DirectoryMessage]:
        return self._directory

    @property
    def relayed(self) -> int:
        """Sockets here whose session is elsewhere, plus sockets elsewhere whose session is here."""
        return len(self._remote_sessions) + len(self._remote_sockets)

    def receive(self, body: bytes) -> None:
        """Messages of a peer."""
        for message in self._decode(body):
            match message:
                case ToSession(session, inner):
                    self._to_session_here(session, inner)
                case OpenSession():
                    self._open(message)
                case _:
                    self._answered(message)
        self.fan_out.start()

    def peers(self, workers: set[int]) -> None:
        """These processes serve now. One that is missing has lost its sockets and sessions.

        If this process is not among them, the others do not know it yet and would not answer.
        """
        if self.worker not in workers:
            return
        lost = self._peers - workers
        self._peers = workers - {self.worker}
        early, self._early = self._early, None
        for message in early or ():
            if not self._open_remotely(message):
                self._open(message)
        for worker in lost:
            self._waiting.pop(worker, None)
        for socket, worker in list(self._remote_sessions.items()):
            if worker in lost:
                del self._remote_sessions[socket]
                self._arrived.tell(
                    CloseSocket(socket, Close.RESTART, "the session ended with its process")
                )
        for socket, session in list(self._remote_sockets.items()):
            if worker_of(socket) in lost:
                del self._remote_sockets[socket]
                self.fan_out.put([(session, Detached(socket))])
        self.fan_out.start()

    # --- to a peer --------------------------------------------------------------------------

    def to_session(self, session: int, message: SessionMessage) -> bool:
        """From a socket here to a session elsewhere. False if that process is gone.

        A frame is dropped then: its socket is about to be closed (1012), and the session may go on where
        it is taken up, so no answer would be true. Raises MailboxFull for a frame while the way there is
        full.
        """
        worker = worker_of(session)
        if isinstance(message, Frame) and self._behind():
            raise MailboxFull(f"the way to gateway {worker}")
        if isinstance(message, Detached):
            self._remote_sessions.pop(message.socket, None)
        if worker not in self._peers:
            return isinstance(message, Frame)
        self._send(worker, ToSession(session, cast(Frame | Detached | Throttled | Drained, message)))
        return True

    def _to_gateway(self, message: GatewayMessage) -> None:
        worker = message.socket % MAX_WORKERS  # `worker_of`, for each token
        if worker == self.worker:
            self.here.tell(message)
        elif worker in self._peers:
            self._send(worker, message)
            if isinstance(message, Opened):
                self._remote_sockets[message.socket] = message.session
            elif isinstance(message, OpenRefused):  # a session may refuse what was `Opened`
                self._remote_sockets.pop(message.socket, None)
        elif isinstance(message, Opened):  # it went while its `open` was under way
            self.fan_out.put([(message.session, Detached(message.socket))])
            self.fan_out.start()

    def _to_directory(self, message: DirectoryMessage) -> None:
        if isinstance(message, OpenSession) and message.open.session is not None:
            if self._early is not None and home(message.open.session, self._workers) != self.worker:
                if len(self._early) >= OPENS:
                    raise MailboxFull("sockets that wait to hear who the peers are")
                self._early.append(message)
                return
            if self._open_remotely(message):
                return
        self.opens.tell(message)

    def _open_remotely(self, message: OpenSession) -> bool:
        """Ask the peer that has the session. False if none has."""
        worker = home(message.open.session or "", self._workers)
        if worker is None or worker not in self._peers:
            return False
        self._send(worker, message)
        self._remote_sessions[message.socket] = worker
        return True

    def _send(self, worker: int, message: PeerMessage) -> None:
        """Raises CannotEncode, which fails the actor that sends the message."""
        waiting = self._waiting.get(worker)
        if waiting is None:
            waiting = self._waiting[worker] = deque([self._batch()])
            self._loop.call_soon(self._flush, worker)
        elif waiting[-1].size >= FRAME_BYTES:
            waiting.append(self._batch())
        waiting[-1].add([message])

    def _batch(self) -> EncodedBatch:
        return EncodedBatch(self._encoder, LARGEST // 2)  # half: a turn's are one message of the core's

    def _flush(self, worker: int) -> None:
        waiting = self._waiting.get(worker)
        while waiting:
            if waiting[0].count:
                try:
                    self._forward(worker, bytes(waiting[0].array()))
                except MailboxFull:  # nothing is lost: it goes, with what joins it, when there is room
                    self._loop.call_later(RETRY_MS / 1e3, self._flush, worker)
                    return
            waiting.popleft()
        self._waiting.pop(worker, None)

    # --- from a peer ------------------------------------------------------------------------

    def _open(self, message: OpenSession) -> None:
        try:
            self.opens.tell(message)
        except MailboxFull:
            error = Error(code=BUSY.code, message=BUSY.message, retry_ms=RETRY_MS)
            self._to_gateway(OpenRefused(message.socket, error))

    def _to_session_here(self, session: int, message: Frame | Detached | Throttled | Drained) -> None:
        if not isinstance(message, Frame):
            if isinstance(message, Detached):
                self._remote_sockets.pop(message.socket, None)
            self.fan_out.put([(session, message)])  # must arrive, if need be later
            return
        try:
            self.sessions.tell(session, message)
        except MailboxFull:
            self._to_gateway(Deliver(message.socket, refuse(message.ops, BUSY, self._most)))

    def _answered(self, message: GatewayMessage) -> None:
        if isinstance(message, OpenRefused):
            self._remote_sessions.pop(message.socket, None)
        self._arrived.tell(message)


class _SessionRouter(Router[SessionMessage]):
    """Sessions here and elsewhere, by number."""

    def __init__(self, router: PeerRouter) -> None:
        super().__init__("sessions")
        self._router = router

    def tell(self, key: int, message: SessionMessage) -> bool:
        if worker_of(key) == self._router.worker:
            return super().tell(key, message)
        return self._router.to_session(key, message)

    def tell_none(self, key: int, messages: list[SessionMessage]) -> None:
        if worker_of(key) != self._router.worker:
            tell_each(partial(self._router.to_session, key), messages)
