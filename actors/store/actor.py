"""The store actor: writes what sessions tell it, in batches, and reads for the directory.

One thread makes all calls, so no step and no socket waits for a disk. Messages that arrive while a batch
is written are the next batch; saves without a waiter are gathered for a moment first. While the store
cannot be written (a full disk), sessions go on: each has one `Save` under way, which bounds the mailbox,
and the batch is tried again each second. Reads would have to wait for that, because they might miss what
is unwritten. So they are refused meanwhile, and the directory, which is told, refuses new sessions.

Of a shared store the actor asks a few times a second which sessions other servers want, and gives its
sign of life with that. Now and then it looks for sessions whose server died with pending ops. It asks
another server for a session for a second; then it takes it.

A database may come back without its last writes, or empty. After each new connection the actor asks what
is missing, and has those sessions save all they have (`Unsaved`). A damaged item concerns its session
alone: the others of its batch are written, and it is saved anew beside the damaged items.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

import anyio
import msgspec
from anyio.abc import TaskStatus

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed, MailboxFull
from ramify.actors.kit.relay import Relay
from ramify.actors.kit.report import StoreHealth
from ramify.actors.store.base import Refusal, Store, StoreDamaged, StoreError, saved_history
from ramify.actors.store.retention import Forgetting
from ramify.protocol.messages import (
    DirectoryMessage,
    Fetch,
    Fetched,
    Forget,
    Moved,
    NotSaved,
    Release,
    Save,
    Saved,
    Saving,
    SessionMessage,
    StoreMessage,
    Unsaved,
    Waiting,
    Wanted,
)
from ramify.protocol.saved import HEAD, SavedHistory

AGAIN_SECONDS = 1.0
TEND_SECONDS = 0.2
ASK_SECONDS = 0.06  # until another server's session is asked for again; twice as long each time
HANDOVER_SECONDS = 1.0  # that it may take to save it
LOOK_SECONDS = 2.0
STALL_SECONDS = 2.0  # of a store that does not answer, after which servers that live may seem dead
GRACE_SECONDS = 15.0  # until they have told
SWEEP_SECONDS = 600.0
GATHER_SECONDS = 0.01
LAST_SECONDS = 5.0  # for sessions that end with the server, and for writing them
BATCH_BYTES = 1 << 23  # of items that are written together, however many saves wait
BATCH_ITEMS = 1 << 14
DAMAGED_SECONDS = 30.0  # until a session that cannot be written is tried again
RECALL_SECONDS = 0.25  # that a request waits for its history
PORTION = 32  # sessions that save all they have at once
PORTION_SECONDS = 0.05

T = TypeVar("T")
log = get_log(__name__)


class StoreActor:
    """`keep_s`, `most`: see `Store.sweep`. `waiting`: sessions for the directory to take up at once.

    `takes`: which of those that wait later are for this process. `report`: hears of each change of how
    the store is.
    """

    def __init__(
        self,
        mailbox: Mailbox[StoreMessage],
        store: Store,
        sessions: Router[SessionMessage],
        directory: Address[DirectoryMessage],
        *,
        keep_s: float,
        most: int,
        waiting: list[str],
        takes: Callable[[str], bool] = lambda session: True,
        report: Callable[[StoreHealth], None] = lambda health: None,
    ) -> None:
        self.mailbox = self._mailbox = mailbox
        self._store = store
        self._sessions = sessions
        self._directory: Relay[DirectoryMessage] = Relay()
        self._directory.connect(directory)
        self._forgetting = Forgetting(keep_s, most)
        self._waiting = waiting
        self._takes = takes
        self._report = report
        self._health = StoreHealth()
        self._connections = store.connections
        self._written: dict[str, tuple[int, int, int]] = {}  # live sessions -> number, fence, last save
        self._mended: dict[str, float] = {}  # sessions that were set aside -> when
        self._damaged: set[str] = set()  # sessions that cannot be written
        self._asked: dict[str, tuple[float, float]] = {}  # of others -> until when, and when again
        self._tried: dict[str, tuple[float, float]] = {}  # left behind: when next, and after how long
        self._thread = ThreadPoolExecutor(1, "store")
        self._pending: list[StoreMessage] = []  # taken out of the mailbox and not done

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until the mailbox is closed and all that it held is written."""
        task_status.started()
        if self._waiting:
            self._directory.tell(Waiting(self._waiting))
        swept = 0.0
        try:
            async with anyio.create_task_group() as group:
                if self._store.shared:
                    group.start_soon(self._attend)
                with suppress(MailboxClosed):
                    while True:
                        self._pending += await self._mailbox.drain()
                        await self._gather()
                        await self._serve()
                        if time.monotonic() - swept > SWEEP_SECONDS:
                            swept = time.monotonic()
                            await self._sweep()
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._last()

    async def _last(self) -> None:
        """Write what sessions tell while they end, and what was begun."""
        with anyio.move_on_after(LAST_SECONDS):
            while len(self._sessions):  # noqa: ASYNC110 (a router tells nobody that it is empty)
                await anyio.sleep(0.01)
        self._mailbox.close()
        self._pending += self._mailbox.drain_nowait()
        self._pending = [each for each in self._pending if not isinstance(each, Fetch)]
        with anyio.move_on_after(LAST_SECONDS):
            await self._serve()
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=False)

    async def _gather(self) -> None:
        """Wait a moment for more saves, as long as no message has a waiter: each batch has a price."""
        begun = 0
        with anyio.move_on_after(GATHER_SECONDS):
            while all(isinstance(each, Save) and not each.awaited for each in self._pending[begun:]):
                begun = len(self._pending)
                self._pending += await self._mailbox.drain()

    async def _serve(self) -> None:
        """Work off what is pending. What is under way stays there until it is done: see `_last`."""
        while self._pending:
            saves = _batch(self._pending)
            if saves:
                await self._write(saves)
            else:
                match self._pending[0]:
                    case Forget(session, fence):
                        self._written.pop(session, None)
                        await self._let_go(session, partial(self._store.forget, session, fence))
                    case Release(session):
                        self._written.pop(session, None)
                        await self._let_go(session, partial(self._store.release, session))
                    case Fetch() as fetch:
                        await self._fetch(fetch)
            del self._pending[: len(saves) or 1]

    async def _write(self, saves: list[Save]) -> None:
        refused = await self._written_apart(saves)
        again: list[StoreMessage] = []
        for place, save in enumerate(saves):
            why = refused.get(place)
            if why is None:
                self._saved(save)
            elif why == "moved":
                log.info("a session is another server's now", session=save.changes.session)
                self._written.pop(save.changes.session, None)
                self._sessions.tell(save.session, Moved(taken=True))
            elif why == "damaged":
                self._sessions.tell(save.session, NotSaved(save.ticket))
                asyncio.get_running_loop().call_later(DAMAGED_SECONDS, self._again, save)
            elif save.again is None:
                self._become(lost=self._health.lost + 1)
                self._sessions.tell(save.session, Unsaved(save.ticket))
            else:
                self._become(lost=self._health.lost + 1)
                whole = save.again()
                again += [] if whole is None else [whole]
        self._pending[len(saves) : len(saves)] = again

    def _saved(self, save: Save) -> None:
        changes = save.changes
        if changes.session in self._damaged:
            self._damaged.discard(changes.session)
            self._become(damaged=len(self._damaged))
        if not save.session:
            self._written.pop(changes.session, None)
            return
        self._written[changes.session] = save.session, changes.fence, changes.count
        if save.awaited:
            self._sessions.tell(save.session, Saved(save.ticket))
        else:
            self._sessions.leave(save.session, Saved(save.ticket))

    # --- damage and loss -------------------------------------------------------------------------

    async def _written_apart(self, saves: list[Save]) -> dict[int, Refusal | Literal["damaged"]]:
        """Write them; where there is damage, ever fewer sessions together. Returns as `Store.write`."""
        try:
            return dict(
                await self._retried(partial(self._store.write, [save.changes for save in saves]))
            )
        except StoreDamaged as error:
            sessions = list(dict.fromkeys(save.changes.session for save in saves))
            if len(sessions) == 1:
                return dict.fromkeys(range(len(saves)), await self._mend(sessions[0], error))
        first = set(sessions[: len(sessions) // 2])
        refused: dict[int, Refusal | Literal["damaged"]] = {}
        for half in (True, False):
            places = [i for i, save in enumerate(saves) if (save.changes.session in first) == half]
            apart = await self._written_apart([saves[i] for i in places])
            refused |= {places[i]: why for i, why in apart.items()}
        return refused

    async def _mend(self, session: str, error: StoreDamaged) -> Literal["lost", "damaged"]:
        """Have the session saved whole beside its damaged items; not if that was done just now."""
        log.error("what the store has of a session is damaged", session=session, error=str(error))
        now = time.monotonic()
        self._mended = {each: at for each, at in self._mended.items() if now - at < SWEEP_SECONDS}
        if session not in self._mended:
            self._mended[session] = now
            try:
                await self._call(partial(self._store.set_aside, session))
            except StoreError as fault:
                log.error("it cannot be set aside", session=session, error=str(fault))
            else:
                return "lost"
        self._damaged.add(session)
        self._become(damaged=len(self._damaged))
        return "damaged"

    def _again(self, save: Save) -> None:
        """Try once more to write what is damaged."""
        with suppress(MailboxClosed, MailboxFull):
            self._mailbox.tell(save)

    async def _let_go(self, session: str, call: Callable[[], None]) -> None:
        try:
            await self._retried(call)
        except StoreDamaged as error:
            await self._mend(session, error)

    async def _compare(self) -> None:
        """The connection was made anew: have all that the store has lost saved again, some at a time."""
        connections = self._store.connections
        if connections == self._connections:
            return
        known = {session: (fence, count) for session, (_, fence, count) in self._written.items()}
        lost = list(await self._call(partial(self._store.behind, known)))
        self._connections = connections
        if lost:
            log.warning("the store has lost what it was told; it is saved again", sessions=len(lost))
            self._become(lost=self._health.lost + len(lost))
        loop = asyncio.get_running_loop()
        for at in range(0, len(lost), PORTION):
            later = at // PORTION * PORTION_SECONDS
            loop.call_later(later, self._tell_lost, lost[at : at + PORTION])

    def _tell_lost(self, sessions: list[str]) -> None:
        for session in sessions:
            number, _, count = self._written.get(session, (0, 0, 0))
            self._sessions.tell(number, Unsaved(count))

    def _become(self, **changed: Any) -> None:
        health = msgspec.structs.replace(self._health, **changed)
        if health != self._health:
            self._health = health
            self._report(health)

    # --- histories of stateless requests ---------------------------------------------------------

    def keep(self, owner: str, history: SavedHistory) -> None:
        """Save it soon. Where too much waits it is lost: its text is tokenized again."""
        with suppress(MailboxClosed, MailboxFull):
            self._mailbox.tell(Save(0, 0, history.changes(owner)))

    def recall(self, asked: Sequence[bytes]) -> list[SavedHistory]:
        """See `Histories.keep`. For other threads, which wait; nothing where that would take long."""
        if self._health.error is not None:
            return []
        try:
            reading = self._thread.submit(saved_history, self._store, asked)
        except RuntimeError:  # it ends
            return []
        try:
            return reading.result(RECALL_SECONDS)
        except (StoreError, TimeoutError, CancelledError):
            reading.cancel()
            return []

    # --- reading ---------------------------------------------------------------------------------

    async def _fetch(self, fetch: Fetch) -> None:
        session = fetch.session
        try:
            if fetch.how == "look":
                head = await self._call(partial(self._store.head, session))
                self._directory.tell(Fetched(session, {} if head is None else {HEAD: head}))
            else:
                await self._take(session, fetch.how)
        except StoreError as error:
            self._asked.pop(session, None)
            log.error("a session could not be read", session=session, error=str(error))
            damaged = isinstance(error, StoreDamaged)
            self._directory.tell(Fetched(session, {}, str(error), damaged=damaged))

    async def _take(self, session: str, how: Literal["free", "ask"]) -> None:
        now = time.monotonic()
        until, pause = self._asked.get(session, (now + HANDOVER_SECONDS, ASK_SECONDS))
        late = now >= until
        taken = await self._call(partial(self._store.take, session, "force" if late else how))
        if taken is not None:
            self._asked.pop(session, None)
            self._directory.tell(Fetched(session, dict(taken.items), fence=taken.fence))
        elif how == "free":
            self._directory.tell(Fetched(session, {}, held=True))
        else:
            self._asked[session] = until, 2 * pause
            loop = asyncio.get_running_loop()
            loop.call_later(min(pause, max(0.0, until - now)), self._ask_again, Fetch(session, "ask"))

    def _ask_again(self, fetch: Fetch) -> None:
        try:
            self._mailbox.tell(fetch)
        except MailboxClosed:
            pass
        except MailboxFull as error:
            self._asked.pop(fetch.session, None)
            self._directory.tell(Fetched(fetch.session, {}, str(error)))

    async def _attend(self) -> None:
        """Attend to a shared store: what other servers want, and sessions of those that are dead."""
        tended = time.monotonic()
        look = tended + LOOK_SECONDS
        while True:
            await anyio.sleep(TEND_SECONDS)
            with suppress(StoreError):  # the next save says it
                await self._compare()
                wanted = await self._call(self._store.tend)
                if wanted:
                    self._directory.tell(Wanted(wanted))
                before, tended = tended, time.monotonic()
                if tended - before > STALL_SECONDS:  # others were kept from their signs too
                    look = max(look, tended + GRACE_SECONDS)
                elif tended > look:
                    look = tended + LOOK_SECONDS
                    await self._look()

    async def _look(self) -> None:
        """Have sessions taken up that were left with ops; one that cannot be, ever more seldom."""
        left = [each for each in await self._call(self._store.waiting) if self._takes(each)]
        now = time.monotonic()
        self._tried = {each: self._tried[each] for each in left if each in self._tried}
        due = [each for each in left if now >= self._tried.get(each, (0.0, 0.0))[0]]
        for each in due:
            pause = min(2 * self._tried.get(each, (0.0, LOOK_SECONDS))[1], SWEEP_SECONDS)
            self._tried[each] = now + pause, pause
        if due:
            self._directory.tell(Waiting(due))

    async def _sweep(self) -> None:
        try:
            gone = await self._call(partial(self._forgetting.sweep, self._store, time.time()))
        except StoreError as error:
            log.error("the store could not be swept", error=str(error))
            return
        if gone:
            log.info("the store has forgotten sessions", sessions=gone)

    async def _retried(self, call: Callable[[], T]) -> T:
        failed = False
        told: set[tuple[int, int]] = set()  # session, ticket
        while True:
            try:
                done = await self._call(call)
            except StoreDamaged:
                self._can_write(failed)
                raise
            except StoreError as error:
                if not failed:
                    log.error("sessions cannot be saved; trying again each second", error=str(error))
                    self._directory.tell(Saving(str(error)))
                    self._become(error=str(error))
                failed = True
                self._refuse(str(error))
                self._tell_unsaved(told)
                await anyio.sleep(AGAIN_SECONDS)
                continue
            self._can_write(failed)
            return done

    def _can_write(self, failed: bool) -> None:
        if failed:
            log.info("sessions are saved again")
            self._directory.tell(Saving(None))
            self._become(error=None)

    def _refuse(self, error: str) -> None:
        """Answer all reads with `error`: nothing can be written."""
        self._pending += self._mailbox.drain_nowait()
        reads = [each.session for each in self._pending if isinstance(each, Fetch)]
        self._pending = [each for each in self._pending if not isinstance(each, Fetch)]
        for session in reads:
            self._asked.pop(session, None)
            self._directory.tell(Fetched(session, {}, error))

    def _tell_unsaved(self, told: set[tuple[int, int]]) -> None:
        """Tell each session that waits for a save, once, that it may take long."""
        for each in self._pending:
            if isinstance(each, Save) and each.session and (each.session, each.ticket) not in told:
                told.add((each.session, each.ticket))
                self._sessions.tell(each.session, NotSaved(each.ticket))

    async def _call(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, call)


def _batch(pending: list[StoreMessage]) -> list[Save]:
    """The saves that come first, as many as are written together."""
    saves, size, items = list[Save](), 0, 0
    for each in pending:
        if not isinstance(each, Save):
            break
        size += sum(map(len, each.changes.put.values()))
        items += len(each.changes.put) + len(each.changes.drop)
        if saves and (size > BATCH_BYTES or items > BATCH_ITEMS):
            break
        saves.append(each)
    return saves
