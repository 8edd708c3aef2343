"""When a session is saved, and what waits for it.

The first save comes before anybody hears of the session: whoever has its key will find it, and a life
that somebody has seen is known to the next one. Then `lazy`: when an op is done, and a second after
anything else has changed, like an output that grows, if no save is under way. `sync`: at once, and
what sockets should hear waits, from the first reply on, until the store has it. Meanwhile the session
goes on; what it says later waits behind that. While the store cannot be written, an `open` whose
answer would wait for it is refused, to be tried again. What is saved carries the session's fence. Once
another server has taken the session, the store refuses it, and nothing that was not saved is told any
more: the other server has its own next words. If the store has lost some of the session, in a crash
or by a change to a standby, all of it is saved anew.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import ref

from ramify.actors.kit.clock import Clock
from ramify.actors.kit.mailbox import Address, MailboxClosed
from ramify.actors.session.core import SessionCore
from ramify.actors.session.sockets.publisher import error_message
from ramify.protocol.errors import Overloaded
from ramify.protocol.messages import Forget, Release, Save, StoreMessage
from ramify.protocol.saved import next_fence
from ramify.protocol.wire import Delta, Done, Event, Ok, ServerMessage, StateReply

LAZY_SECONDS = 1.0
NEXT_SECONDS = 0.05  # until an op is saved that was done while a lazy save was under way
RETRY_MS = 2000  # when an `open` may be tried again


class Saver:
    """Saves one session. `fence`: what the store gave for it; 0: it has nothing of it yet.

    `late`: the session has been there without a saver. `wall`: seconds since 1970.
    """

    def __init__(
        self,
        core: SessionCore,
        store: Address[StoreMessage],
        clock: Clock,
        *,
        fence: int = 0,
        late: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._core = core
        self._subscribers = core.publisher.subscribers
        self._store = store
        self._now = clock.now
        self._wall = wall
        self._stored = fence > 0
        self._fence = fence or next_fence()
        self._told = False  # the store knows of this life of the session
        self._ticket = 0
        self._lazy: int | None = None  # the tickets of what is under way
        self._sync: int | None = None
        self._covered: dict[int, int] = {}  # socket -> messages that wait for `_sync`
        self._ready: dict[int, int] = {}  # socket -> messages that have waited
        self._due: float | None = None  # when what has changed is saved, if anything has
        self._leaving = False
        self._failing = False  # `_sync` could not be written, and is tried again
        self._unheard = not fence and not late  # nobody has heard of the session yet
        self._late = late  # and nothing of it was saved yet
        self._lost = False  # it is another server's
        self._anew: int | None = None  # the ticket up to which the store has lost some
        self._whole = 0  # the ticket of the last save that was
        self._blank = False  # the recorder takes it that the store has nothing
        self.again: Callable[[], object | None] = lambda: None  # what makes the last save again
        self._unflushed = False  # a lazy save was told since the last one that is flushed to the disk

    # --- what sockets may hear -------------------------------------------------------------------

    def turn(self) -> bool:
        """Save if there is reason to: the session has handled something, or its time has come.

        Returns `holds`.
        """
        if self._lost:
            return True
        now, due = self._now(), self._due
        if self._anew is not None:
            self._save_anew()
        if due is None or now >= due or self._ready or self._failing or not self._told:
            return self._look(now)
        for subscriber in self._subscribers.values():
            for message in subscriber.out:
                if type(message) is not Delta:
                    return self._look(now)
        self._core.state.out.wake(due)  # as for nearly every token
        return self._sync is not None and self.holds

    def _look(self, now: float) -> bool:
        here = self._subscribers
        if self._ready:  # a socket may have gone before it was sent what it may hear
            self._ready = {socket: count for socket, count in self._ready.items() if socket in here}
        done, owes = self._done()
        if self._sync is None and (owes or not self._told):
            self._told, done = True, False
            self._sync = self._save(sync=owes, awaited=True)
            if self._sync is not None:
                self._covered = {s.socket: len(s.out) for s in here.values()}
        self._save_lazily(now, done)
        if self._failing:
            self._turn_away()
        return self.holds

    def _save_lazily(self, now: float, done: bool) -> None:
        """Save now, or set the time at which to save. `done`: an op has its reply."""
        due = self._due if self._due is not None else now + LAZY_SECONDS
        if self._lazy is None and (done or now >= due):
            self._lazy = self._save()
            self._due = None if self._lazy is None else now + LAZY_SECONDS
        else:  # not later than it was to be; but its time may have come while a save is under way
            later = now + (NEXT_SECONDS if done else LAZY_SECONDS)
            self._due = due if now < due < later else later
        if self._due is not None:
            self._core.state.out.wake(self._due)

    def _turn_away(self) -> None:
        """Refuse each `open` whose answer waits for the store. A new session ends with that."""
        error = Overloaded(
            "the session cannot be saved now (the server's log says why): try later",
            retry_ms=RETRY_MS,
        )
        here = self._subscribers.values()
        for socket in [s.socket for s in here if not self._ready.get(s.socket) and s.unanswered]:
            self._covered.pop(socket, None)
            self._core.state.out.refused.append((socket, error_message(error)))
            self._core.detached(socket, self._now())
        if self._late:  # those who were here before wait for nothing
            self._covered = {}
        if self._unheard and self._core.ended is None:
            self._core.ended = "unsaved"

    @property
    def holds(self) -> bool:
        """Whether sockets hear only what is `ready`. A session that is over tells the rest."""
        if self._lost:
            return True
        if self._core.ended is not None and not self._leaving:
            return False
        if self._late and self._failing:
            return False
        return self._sync is not None or bool(self._ready)

    def ready(self, socket: int) -> int:
        """How many of its messages may be sent, while some are held."""
        return self._ready.get(socket, 0)

    def sent(self, socket: int, count: int) -> None:
        """Note that so many of the `ready` messages were sent."""
        left = self._ready.pop(socket, 0) - count
        if left > 0:
            self._ready[socket] = left
        if socket in self._covered:
            self._covered[socket] -= count

    def saved(self, ticket: int) -> None:
        """Note that the store has what was saved with this ticket, and everything before."""
        if ticket == self._lazy:
            self._lazy = None
        if ticket == self._sync:
            self._sync = None
            self._failing = self._unheard = self._late = False
            here = self._subscribers
            self._ready = {s: count for s, count in self._covered.items() if count and s in here}
            self._covered = {}

    def failed(self, ticket: int) -> None:
        """Note that a save could not be written; the store tries it again."""
        if ticket == self._sync:
            self._failing = True

    def unsaved(self, ticket: int) -> None:
        """Save everything anew: the store has lost what was saved up to this ticket."""
        if ticket > self._whole and not self._lost:
            self._anew = ticket
            if self._core.recorder is not None:  # all of it may be much to encode
                self._core.recorder.reset()
                self._blank = True

    def _save_anew(self) -> None:
        """Save everything anew; replies that waited for lost saves wait for this one."""
        waits = self._sync is not None
        ticket = self._save(sync=waits or self._synced, awaited=waits, whole=True)
        self._anew = None
        if ticket is None:  # it is not to be saved any more, so nothing waits
            for lost in (self._lazy, self._sync):
                if lost is not None:
                    self.saved(lost)
            return
        if waits:
            self._sync = ticket
        self._lazy = ticket

    def _done(self) -> tuple[bool, bool]:
        """Whether a socket is about to hear that an op is done; and whether that op must be saved first.

        What waits for a save already, or has waited, is not looked at again.
        """
        done = False
        for subscriber in self._subscribers.values():
            socket = subscriber.socket
            known = self._covered.get(socket) or self._ready.get(socket, 0)
            for message in subscriber.out[known:] if known else subscriber.out:
                kind = type(message)
                if kind is Delta:
                    continue
                if kind is Ok or kind is Done or kind is Event:
                    done = True
                    if self._waits(message):
                        return True, True
                elif kind is StateReply and self._synced:
                    return True, True  # it shows what ran while nobody was here
        return done, False

    @property
    def _synced(self) -> bool:
        """Whether anything of the session is saved with `sync`."""
        state = self._core.state
        return state.persist == "sync" or any(b.persist == "sync" for b in state.branches.values())

    def _waits(self, message: ServerMessage) -> bool:
        state = self._core.state
        branch = state.branches.get(getattr(message, "branch", None) or "")
        return ((branch.persist if branch is not None else None) or state.persist) == "sync"

    # --- saving ----------------------------------------------------------------------------------

    def _save(
        self, *, sync: bool = False, awaited: bool = False, last: bool = False, whole: bool = False
    ) -> int | None:
        """Save. Returns the ticket; None: there is nothing to save. `awaited`: see `messages.Save`."""
        core = self._core
        if core.recorder is not None and not core.recorder.kept:
            if self._stored:
                self._stored = False
                core.recorder.reset()
                self._tell(Forget(core.identity.session, self._fence))
            return None
        # What somebody is to hear may be on its way in a lazy save, which nobody waits for.
        force = sync and self._unflushed
        save = self._collect(sync=sync, awaited=awaited, last=last, force=force, whole=whole)
        if save is None:
            return None
        self._tell(save)
        return self._ticket

    def _collect(
        self, *, sync: bool, awaited: bool, last: bool, force: bool, whole: bool
    ) -> Save | None:
        """Make the next save."""
        core = self._core
        if whole and core.recorder is not None and not self._blank:
            core.recorder.reset()
        self._blank = False
        whole = whole or not self._stored
        changes = core.changes(
            self._wall(),
            sync=sync,
            live=not last,
            force=force or whole,
            fence=self._fence,
            count=self._ticket + 1,
            whole=whole,
        )
        if changes is None:
            return None
        self._stored, self._unflushed = True, not sync
        self._ticket += 1
        if whole:
            self._whole = self._ticket
        again = partial(self._collect, sync=sync, awaited=False, last=True, force=True, whole=True)
        if not last:
            return Save(core.state.number, self._ticket, changes, awaited, None)
        self.again = ref(again)
        return Save(0, self._ticket, changes, awaited, again)

    def _tell(self, message: StoreMessage) -> None:
        with suppress(MailboxClosed):
            self._store.tell(message)

    # --- the end ---------------------------------------------------------------------------------

    def leave(self) -> bool:
        """Prepare to leave: the server stops, or another one wants the session. Returns whether the
        session goes on elsewhere, with all its ops.
        """
        recorder = self._core.recorder
        self._leaving = recorder is not None and recorder.kept
        return self._leaving

    def lose(self) -> None:
        """Save and tell nothing any more: another server has taken the session."""
        self._lost = True
        self._ready = {}

    def end(self) -> None:
        """Tell the store how it ends: the session leaves the memory, or is over (`core.ended`)."""
        session = self._core.identity.session
        match self._core.ended:
            case _ if self._lost:
                pass
            case "closed" | "unsaved":
                if self._stored:
                    self._tell(Forget(session, self._fence))
            case "crashed":  # nobody knows what it is now; the store has what it was
                if self._stored:
                    self._tell(Release(session))
            case _:
                self._save(last=True, whole=self._anew is not None)
