"""The store actor: writes what sessions tell it, in batches, and reads for the directory.

One thread makes all calls, so no step and no socket waits for a disk. What waits in the mailbox while a
batch is written is the next batch; saves that nobody waits for are gathered for a moment first. While
the store cannot be written (a full disk), sessions go on: each has one `Save` under way, so what waits
is bounded by them; the batch is tried again each second. Reads would have to wait for that, because what
they are to find may be unwritten: they are refused meanwhile, and the directory, which is told, refuses
new sessions.

Of a store that several servers share it asks a few times a second which sessions others want, and gives
its sign of life with that; and it looks now and then for sessions whose server has died with ops that
wait. It asks another server for a session for a second; then it takes it.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Literal, TypeVar

import anyio
from anyio.abc import TaskStatus

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed, MailboxFull
from ramify.actors.kit.relay import Relay
from ramify.actors.store.base import Store, StoreDamaged, StoreError
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
    Waiting,
    Wanted,
)
from ramify.protocol.saved import HEAD

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

T = TypeVar("T")
log = get_log(__name__)


class StoreActor:
    """`keep_s`, `most`: see `Store.sweep`. `waiting`: sessions for the directory to take up at once.

    `takes`: which of those that wait later are for this process.
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
    ) -> None:
        self._mailbox = mailbox
        self._store = store
        self._sessions = sessions
        self._directory: Relay[DirectoryMessage] = Relay()
        self._directory.connect(directory)
        self._keep = keep_s
        self._most = most
        self._waiting = waiting
        self._takes = takes
        self._asked: dict[str, tuple[float, float]] = {}  # of others -> until when, and when again
        self._tried: dict[str, tuple[float, float]] = {}  # left behind: when next, and after how long
        self._thread = ThreadPoolExecutor(1, "store")
        self._pending: list[StoreMessage] = []  # taken out of the mailbox and not done

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until the mailbox is closed and all that it held is written."""
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
        """What sessions tell while they end, which may be now, and what was begun."""
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
        """Wait a moment for more saves, as long as nobody waits for anything: each batch has a price."""
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
                        await self._retried(partial(self._store.forget, session, fence))
                    case Release(session):
                        await self._retried(partial(self._store.release, session))
                    case Fetch() as fetch:
                        await self._fetch(fetch)
            del self._pending[: len(saves) or 1]

    async def _write(self, saves: list[Save]) -> None:
        moved = await self._retried(partial(self._store.write, [save.changes for save in saves]))
        for place, save in enumerate(saves):
            if place in moved:
                log.info("a session is another server's now", session=save.changes.session)
            if not save.session:
                continue
            if place in moved:
                self._sessions.tell(save.session, Moved(taken=True))
            elif save.awaited:
                self._sessions.tell(save.session, Saved(save.ticket))
            else:
                self._sessions.leave(save.session, Saved(save.ticket))

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
        """Of a store that is shared: what others want of this server, and what dead ones have left."""
        tended = time.monotonic()
        look = tended + LOOK_SECONDS
        while True:
            await anyio.sleep(TEND_SECONDS)
            with suppress(StoreError):  # the next save says it
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
        now = time.time()
        sweep = partial(self._store.sweep, older_than=now - self._keep, most=self._most, now=now)
        try:
            gone = await self._call(sweep)
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
            except StoreError as error:
                if not failed:
                    log.error("sessions cannot be saved; trying again each second", error=str(error))
                    self._directory.tell(Saving(str(error)))
                failed = True
                self._refuse(str(error))
                self._tell_unsaved(told)
                await anyio.sleep(AGAIN_SECONDS)
                continue
            if failed:
                log.info("sessions are saved again")
                self._directory.tell(Saving(None))
            return done

    def _refuse(self, error: str) -> None:
        """Nothing can be written: answer who would read."""
        self._pending += self._mailbox.drain_nowait()
        reads = [each.session for each in self._pending if isinstance(each, Fetch)]
        self._pending = [each for each in self._pending if not isinstance(each, Fetch)]
        for session in reads:
            self._asked.pop(session, None)
            self._directory.tell(Fetched(session, {}, error))

    def _tell_unsaved(self, told: set[tuple[int, int]]) -> None:
        """Each session that waits for a save hears once that it may take long."""
        for each in self._pending:
            if isinstance(each, Save) and each.session and (each.session, each.ticket) not in told:
                told.add((each.session, each.ticket))
                self._sessions.tell(each.session, NotSaved(each.ticket))

    async def _call(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, call)


def _batch(pending: list[StoreMessage]) -> list[Save]:
    """The saves that come first, as many as are written together."""
    saves: list[Save] = []
    size = items = 0
    for each in pending:
        if not isinstance(each, Save):
            break
        size += sum(map(len, each.changes.put.values()))
        items += len(each.changes.put) + len(each.changes.drop)
        if saves and (size > BATCH_BYTES or items > BATCH_ITEMS):
            break
        saves.append(each)
    return saves
