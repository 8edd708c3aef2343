"""The session actor: drains its mailbox into the core, then sends what the core wants sent.

A thin shell: the order of sending (sockets, cache, scheduler), one frame for each socket and
drain, the timer, and the queue for long text (`encoder`).

Mailbox: a full one (a client that sends faster than its session can work) makes the gateway answer
`overloaded`; the engine's own messages are one per step, so for them a full one is a bug, which
ends this session only.
"""

import asyncio

from ramify.actors.kit.clock import Clock, Timer
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed, MailboxFull
from ramify.actors.session.core import SessionCore
from ramify.actors.session.drafts import Prepared
from ramify.actors.session.encoder import Encoder, Job
from ramify.actors.session.outbox import Encoded, EncodeText
from ramify.protocol.errors import Overloaded, RamifyError
from ramify.protocol.messages import (
    Attach,
    CacheMessage,
    CloseSocket,
    Deliver,
    Detached,
    Drained,
    Frame,
    GatewayMessage,
    Inspected,
    RequestMessage,
    SessionMessage,
    Throttled,
    Tick,
    Tokens,
)

MAILBOX = 4096

SessionEvent = SessionMessage | Encoded


class SessionActor:
    """Runs one session until it ends."""

    def __init__(
        self,
        mailbox: Mailbox[SessionEvent],
        core: SessionCore,
        *,
        cache: Address[CacheMessage],
        scheduler: Address[RequestMessage],
        gateway: Address[GatewayMessage],
        clock: Clock,
        encoder: Encoder,
    ) -> None:
        self.core = core
        self._encoder = encoder
        self._mailbox = mailbox
        self._cache = cache
        self._scheduler = scheduler
        self._gateway = gateway
        self._clock = clock
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._failure = "the server has stopped"

    def fail(self, reason: str) -> None:
        """The engine is broken: once it has read what waits, the session ends its ops and itself."""
        self._failure = reason
        self._mailbox.close()

    async def run(self) -> None:
        """Return when the session is over; whatever the core raises is a bug and ends it too.

        If its mailbox is closed, or another actor's, the engine goes down and takes it along.
        """
        core = self.core
        self._send()
        try:
            while core.ended is None:
                for message in await self._mailbox.drain():
                    self._handle(message)
                    if core.ended is not None:
                        break
                self._send()
        except MailboxClosed:
            core.fail(RamifyError(self._failure), self._clock.now())
            self._send()
        finally:
            self._encoder.forget(core.state.owner, core.state.number)
            if self._timer is not None:
                self._timer.cancel()

    def _handle(self, message: SessionEvent) -> None:
        core, now = self.core, self._clock.now()
        match message:
            case Tokens():
                core.tokens(message, now)
            case Frame(socket, ops):
                core.frame(socket, ops, now)
            case Attach():
                core.attach(message, now)
            case Detached(socket):
                core.detached(socket, now)
            case Throttled(socket):
                core.throttled(socket, True, now)
            case Drained(socket):
                core.throttled(socket, False, now)
            case Inspected():
                core.inspected(message, now)
            case Encoded(ticket, prepared, error):
                core.encoded(ticket, prepared, error, now)
            case Tick():
                core.tick(now)

    def _send(self) -> None:
        core = self.core
        out = core.state.out
        # Sockets first: when the engine goes down, telling the others raises, and ends must be heard.
        for attachment in core.attachments.values():
            if attachment.out:
                self._gateway.tell(Deliver(attachment.socket, attachment.out))
                attachment.out = []
        for socket, note in out.notes:
            self._gateway.tell(Deliver(socket, [note]))
        out.notes.clear()
        for socket, code, reason in out.closes:
            self._gateway.tell(CloseSocket(socket, code, reason))
        out.closes.clear()
        if out.cache:
            for to_cache in out.cache:
                self._cache.tell(to_cache)
            out.cache.clear()
        if out.scheduler:
            for to_scheduler in out.scheduler:
                self._scheduler.tell(to_scheduler)
            out.scheduler.clear()
        for job in out.encode:
            self._encode(job)
        out.encode.clear()
        if out.wake_at is not None:
            self._wake(out.wake_at)
            out.wake_at = None

    def _wake(self, when: float) -> None:
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._clock.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._tell(Tick())

    def _encode(self, job: EncodeText) -> None:
        def done(prepared: Prepared | None, error: BaseException | None) -> None:
            self._tell(Encoded(job.ticket, prepared, error))

        state = self.core.state
        try:
            self._encoder.submit(state.owner, state.number, Job(job.size, job.run, done))
        except Overloaded as error:
            done(None, error)

    def _tell(self, message: SessionEvent) -> None:
        """A message to itself."""
        try:
            self._mailbox.tell(message)
        except MailboxClosed:
            pass
        except MailboxFull:  # try again when what waits was worked off
            asyncio.get_running_loop().call_later(0.05, self._tell, message)
