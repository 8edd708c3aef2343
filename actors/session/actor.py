"""The session actor: drains its mailbox into the core, then sends what the core wants sent.

It sends in this order: to sockets, to the cache, to the scheduler. A socket gets one frame for all that
was read from the mailbox at once. A frame, tokens and ends that find it idle are handled in the turn of
the loop that brings them (`SessionActor._take`); what is too much for that turn is left to its task. It
also has the timer and the way to the queue for long text (`encoder`).

Back-pressure. What clients cause has a part of the room in the mailboxes of gateway, cache and scheduler
(`kit.mailbox.LimitedAddress`). When it is used up, a session keeps what it wanted to say and reads
nothing more until it could say it; its own mailbox (`SessionMailbox`) then refuses frames, and the
gateway answers `overloaded`. So nothing is lost, and no client fills a mailbox that others need. A
session that has much to say hands over after each message that it reads, and lets others run. So does
one that has much to do (`work`): all of those take turns (`turns`), one in a turn of the loop.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from ramify.actors.kit.clock import Clock, Timer
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed, MailboxFull, joined, tell_each
from ramify.actors.kit.turns import Turns
from ramify.actors.kit.working import Working, cell_of
from ramify.actors.session.branches.state import Encoded, EncodeText, Made, Outbox
from ramify.actors.session.core import FAILED, MOVED, SessionCore
from ramify.actors.session.saver import Saver
from ramify.actors.tokenizer.encoder import Encoder, Job
from ramify.protocol.errors import Close, Overloaded, RamifyError
from ramify.protocol.messages import (
    Attach,
    CacheMessage,
    ChangeCore,
    CloseSocket,
    Compiled,
    Deliver,
    Detached,
    Drained,
    Frame,
    GatewayMessage,
    GrammarMessage,
    Inspected,
    Lost,
    Moved,
    NotCompiled,
    NotSaved,
    OpenRefused,
    RequestMessage,
    Saved,
    SessionMessage,
    Throttled,
    Tick,
    Tokens,
    Unsaved,
)

ENDS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)  # of the task or the process, no fault
HANDFUL = 512  # messages to cache and scheduler that one turn of the loop may bring
BEHIND_SECONDS = 0.002  # until a full mailbox is tried again

log = get_log(__name__)


@dataclass(frozen=True)
class Displace:
    """Make room for another session, unless somebody is here."""


SessionEvent = SessionMessage | Encoded | Displace


class SessionActor:
    """Runs one session until it ends."""

    def __init__(
        self,
        mailbox: Mailbox[SessionEvent],
        core: SessionCore,
        *,
        cache: Address[CacheMessage],
        scheduler: Address[RequestMessage],
        grammar: Address[GrammarMessage],
        gateway: Address[GatewayMessage],
        clock: Clock,
        encoder: Encoder,
        turns: Turns,
        saver: Saver | None = None,
        working: Working | None = None,
    ) -> None:
        self._working = working
        self._cell = b"" if working is None else cell_of(core.identity.session)
        self.core = core
        self._turns = turns
        self._saver = saver
        self._encoder = encoder
        self._mailbox = mailbox
        self._cache = cache
        self._scheduler = scheduler
        self._grammar = grammar
        self._gateway = gateway
        self._clock = clock
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._failure = "the server has stopped"
        self._broken = False
        self._to_change = False  # the core, as soon as nothing runs
        self._fault: BaseException | None = None  # what `_take` has met; `run` raises it
        self._taking = False  # in the turn of another
        self.coming: set[int] = set()  # sockets that it was told to `attach`, and has not attached yet

    # --- an `Addressee` ------------------------------------------------------------------------

    def tell(self, message: SessionMessage, /) -> None:
        """Deliver a message. A frame is handled at once if the session is idle.

        While it sends (`_taking`), whoever hears of it may answer at once: that is for later.
        """
        if type(message) is Frame and not self._taking and self._mailbox.awaited:
            self._take(message)
        else:
            self._mailbox.tell(message)

    def leave(self, message: SessionMessage, /) -> None:
        self._mailbox.leave(message)

    def tell_all(self, messages: list[SessionMessage], /) -> None:
        """Deliver messages. Tokens and ends are handled at once if the session is idle."""
        message: SessionMessage | None = None
        if not self._taking and self._mailbox.awaited:
            together = messages if len(messages) == 1 else joined(messages)
            message = together[0] if len(together) == 1 else None
        if type(message) is not Tokens:
            tell_each(self._mailbox.tell, messages)
            return
        messages.clear()
        self._take(message)

    def _take(self, message: Frame | Tokens) -> None:
        """Handle a message and send what follows, in the caller's turn of the event loop.

        That costs less than waking the task, which goes on with what is too much for now.
        """
        try:
            core, work, working = self.core, self.core.work, self._working
            self._taking = True
            if working is not None:
                working.on(self._cell)
            if isinstance(message, Frame):
                core.framed(message, self._clock.now())
            else:
                core.tokens(message, self._clock.now())
            sent = self._send()
            self._taking = False
            if working is not None:
                working.off()
            # tokens alone begin and end no op, and leave nothing undone but what is to be saved
            ops = isinstance(message, Frame) or message.finished or core.recorder is not None
            if not sent or (ops and (core.unfinished or core.ended is not None or self._to_change)):
                self._tell(Tick())  # `run` goes on
            elif work.left < work.most:
                self._turns.renew(work)
        except BaseException as error:  # as in `live`
            self._taking = False
            if isinstance(error, ENDS):
                raise
            self._fault = error
            self._tell(Lost(repr(error)))

    def fail(self, reason: str) -> None:
        """Have the session end its ops and itself, once it has read what waits: the engine is broken."""
        self._failure = reason
        self._broken = True
        self._mailbox.close()

    def attach(self, message: Attach) -> None:
        """Have a socket attached; until it is, the session does not expire. Raises MailboxFull."""
        self._mailbox.tell(message)
        self.coming.add(message.socket)

    def save_with(self, saver: Saver | None) -> None:
        """Begin to save the session, which had no saver. None: nothing saves it."""
        self._saver = saver

    @property
    def saves(self) -> bool:
        """Whether it has a saver."""
        return self._saver is not None

    def displace(self) -> None:
        """End the session if nobody uses it, and nothing runs in it."""
        self._tell(Displace())

    def give_up(self) -> None:
        """Save the session and let it go: another server waits for it."""
        self._tell(Moved(taken=False))

    def part(self) -> None:
        """Take the core of an ended session apart, unless its last save has to be made again."""
        again = self._saver.again() if self._saver is not None else None
        if again is None:
            self.core.part()
        else:
            finalize(again, self.core.part).atexit = False

    async def live(self, on_end: Callable[[int, str], None]) -> None:
        """`run`, whatever happens. `on_end` gets the close code and reason for the session's sockets.

        A session that crashes ends alone. Raises only what ends the process or its tasks.
        """
        code, reason = Close.DONE, "the session has ended"
        try:
            await self.run()
            if self.core.ended in (FAILED, MOVED):
                code, reason = Close.RESTART, self.core.ended
        except BaseException as error:  # a panic of a native library is no Exception
            if isinstance(error, ENDS):
                raise
            log.exception("session crashed", session=self.core.identity.session)
            self.core.ended = "crashed"
            code, reason = Close.SERVER_BUG, "the session failed"
        finally:
            on_end(code, reason)

    async def run(self) -> None:
        """Return when the session is over; whatever the core raises is a bug and ends it too.

        If its mailbox is closed, or another actor's, the engine goes down and takes it along.
        """
        core = self.core
        try:
            await self._hand_over()
            await self._finish()  # what it was restored with
            while core.ended is None:
                messages = await self._mailbox.drain()
                await self._finish()  # what was begun in the turn of another (`_take`)
                for message in joined(messages) if core.ended is None else ():
                    self._handle(message)
                    if type(message) is Tokens and not message.finished:
                        continue  # no op has begun or ended: nothing is to be done about it
                    if core.unfinished:
                        await self._finish()
                    if self._to_change and not core.busy:
                        self._change_core()
                    if core.ended is not None:
                        break
                    if (
                        core.work.over
                        or len(core.state.out.cache) + len(core.state.out.scheduler) >= HANDFUL
                    ):
                        await self._next_turn()
                if not self._send():
                    await self._hand_over()
                self._rest()
                if core.work.left < core.work.most:  # tokens alone cost nothing of it
                    core.work.renew()
        except MailboxClosed:
            if self._saver is not None and self._saver.leave():
                core.ended = FAILED  # its ops go on where it is taken up again: none of them has ended
            else:
                core.fail(RamifyError(self._failure), self._clock.now())
            await self._hand_over()
        finally:
            if self._saver is not None:
                self._saver.end()
            self._encoder.forget(core.state.owner, core.state.number)
            if self._timer is not None:
                self._timer.cancel()

    async def _finish(self) -> None:
        """Do what is left of a message, in turns of its own: what others do comes in between."""
        core = self.core
        while core.unfinished and core.ended is None:
            await self._next_turn()
            if self._working is not None:
                self._working.on(self._cell)
            core.go_on(self._clock.now())

    async def _next_turn(self) -> None:
        """Send everything, unless an op is half done, and let others run."""
        if not self.core.inside:
            await self._hand_over()
        self._rest()
        await self._turns.next()
        self.core.work.renew()

    def _rest(self) -> None:
        """Note that other sessions work now."""
        if self._working is not None:
            self._working.off()

    async def _hand_over(self) -> None:
        """Send everything. Returns when it is sent, or when nobody is left to receive it."""
        while not self._send() and not self._broken:
            await self._clock.sleep_until(self._clock.now() + BEHIND_SECONDS)

    def _handle(self, message: SessionEvent) -> None:
        core, now = self.core, self._clock.now()
        if self._working is not None:
            self._working.on(self._cell)
        match message:
            case Tokens():
                core.tokens(message, now)
            case Frame():
                core.framed(message, now)
            case Attach():
                core.attach(message, now)
                self.coming.discard(message.socket)
            case Detached(socket):
                core.detached(socket, now)
            case Throttled(socket):
                core.throttled(socket, True, now)
            case Drained(socket):
                core.throttled(socket, False, now)
            case Inspected():
                core.inspected(message, now)
            case Compiled() | NotCompiled():
                core.compiled(message, now)
            case Encoded(ticket, prepared, error):
                core.encoded(ticket, prepared, error, now)
            case Saved() | NotSaved() | Unsaved():
                self._stored(message)
            case Moved(taken):
                self._move(taken)
            case ChangeCore(quietly):
                self._to_change = True
                if not quietly:
                    self._change_core()
            case Tick():
                core.tick(now, stays=bool(self.coming))
            case Displace():
                core.displace(now, stays=bool(self.coming))
            case Lost(reason):
                # A bug somewhere, which ends this session only; or the engine goes down.
                raise self._fault or RuntimeError(reason)

    def _stored(self, message: Saved | NotSaved | Unsaved) -> None:
        """Handle the store's answer to a save."""
        if (saver := self._saver) is not None:
            hear = {Saved: saver.saved, NotSaved: saver.failed, Unsaved: saver.unsaved}
            hear[type(message)](message.ticket)

    def _move(self, taken: bool) -> None:
        """End the session here: its ops go on at another server, and none of them has ended."""
        if self._saver is not None:
            if taken:
                self._saver.lose()
                self.core.ended = MOVED
            elif self._saver.leave():
                self.core.ended = MOVED

    def _change_core(self) -> None:
        self._to_change = False
        self.core.change_core(self._clock.now())

    def _send(self) -> bool:
        """Send what the core wants sent. False if a mailbox is full: the rest waits, in order."""
        out = self.core.state.out
        if out.retained and not self.core.unfinished:  # else there may be another word of it
            out.seal(self.core.state.owner)
        try:
            # Sockets first: when the engine goes down telling the others raises, and ends must be heard.
            holds = self._saver is not None and self._saver.turn()
            if out.refused:
                _tell_all(self._gateway, out.refused, lambda refused: OpenRefused(*refused))
            if holds and self._saver is not None:
                self._send_saved(self._saver)
                return self._send_on(out)
            for subscriber in self.core.publisher.subscribers.values():
                if subscriber.out:
                    self._gateway.tell(Deliver(subscriber.socket, subscriber.out))
                    subscriber.out = []
            if out.notes:
                _tell_all(self._gateway, out.notes, lambda note: Deliver(note[0], [note[1]]))
            if out.closes:
                _tell_all(self._gateway, out.closes, lambda close: CloseSocket(*close))
            others = out.cache or out.grammar or out.scheduler or out.encode or out.wake_at is not None
            return self._send_on(out) if others else True
        except MailboxFull:
            return False

    def _send_saved(self, saver: Saver) -> None:
        """Send each socket what the store has by now; the rest waits. Raises MailboxFull."""
        for subscriber in self.core.publisher.subscribers.values():
            count = saver.ready(subscriber.socket)
            if count:
                self._gateway.tell(Deliver(subscriber.socket, subscriber.out[:count]))
                del subscriber.out[:count]
                saver.sent(subscriber.socket, count)

    def _send_on(self, out: Outbox) -> bool:
        """Send what is for the other actors. Raises MailboxFull."""
        _tell_all(self._cache, out.cache)
        _tell_all(self._grammar, out.grammar)
        _tell_all(self._scheduler, out.scheduler)
        for job in out.encode:
            self._encode(job)
        out.encode.clear()
        if out.wake_at is not None:
            self._wake(out.wake_at)
            out.wake_at = None
        return True

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
        def done(prepared: Made | None, error: BaseException | None) -> None:
            self._tell(Encoded(job.ticket, prepared, error))

        state = self.core.state
        try:
            made = Job(job.size, job.run, done, queue=job.queue)
            self._encoder.submit(state.owner, state.number, made)
        except Overloaded as error:
            done(None, error)

    def _tell(self, message: SessionEvent) -> None:
        """Put a message into the session's own mailbox."""
        try:
            self._mailbox.tell(message)
        except MailboxClosed:
            pass
        except MailboxFull:  # try again when what waits was worked off
            asyncio.get_running_loop().call_later(0.05, self._tell, message)


def _tell_all(
    address: Address[Any], waiting: list[Any], wrap: Callable[[Any], Any] = lambda m: m
) -> None:
    """Tell each and take it off the list; if one cannot be told, it and what follows stay there."""
    told = 0
    try:
        for message in waiting:
            address.tell(wrap(message))
            told += 1
    finally:
        del waiting[:told]
