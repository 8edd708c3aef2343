"""The store actor: writes what sessions tell it, in batches, and reads for the directory.

One thread makes all calls, so no step and no socket waits for a disk. What waits in the mailbox while a
batch is written is the next batch. While the store cannot be written (a full disk), sessions go on: each
has one `Save` under way, so what waits is bounded by them; the batch is tried again each second. Reads
would have to wait for that, because what they are to find may be unwritten: they are refused meanwhile,
and the directory, which is told, refuses new sessions.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskStatus

from ramify.actors.kit.fanout import Router
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed
from ramify.actors.kit.relay import Relay
from ramify.actors.store.base import Store, StoreError
from ramify.protocol.messages import (
    DirectoryMessage,
    Fetch,
    Fetched,
    Forget,
    NotSaved,
    Save,
    Saved,
    Saving,
    SessionMessage,
    StoreMessage,
    Waiting,
)

AGAIN_SECONDS = 1.0
SWEEP_SECONDS = 600.0
LAST_SECONDS = 5.0  # for sessions that end with the server, and for writing them

T = TypeVar("T")
log = get_log(__name__)


class StoreActor:
    """`keep_s`, `most`: see `Store.sweep`. `waiting`: sessions for the directory to take up at once."""

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
    ) -> None:
        self._mailbox = mailbox
        self._store = store
        self._sessions = sessions
        self._directory: Relay[DirectoryMessage] = Relay()
        self._directory.connect(directory)
        self._keep = keep_s
        self._most = most
        self._waiting = waiting
        self._thread = ThreadPoolExecutor(1, "store")
        self._pending: list[StoreMessage] = []  # taken out of the mailbox and not done

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until the mailbox is closed and all that it held is written."""
        task_status.started()
        if self._waiting:
            self._directory.tell(Waiting(self._waiting))
        swept = 0.0
        try:
            while True:
                self._pending += await self._mailbox.drain()
                await self._serve()
                if time.monotonic() - swept > SWEEP_SECONDS:
                    swept = time.monotonic()
                    await self._sweep()
        except MailboxClosed:
            pass
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

    async def _serve(self) -> None:
        """Work off what is pending. What is under way stays there until it is done: see `_last`."""
        while self._pending:
            saves = list(takewhile(lambda each: isinstance(each, Save), self._pending))
            if saves:
                await self._write(saves)
            else:
                match self._pending[0]:
                    case Forget(session):
                        await self._retried(partial(self._store.delete, [session]))
                    case Fetch(session):
                        await self._fetch(session)
            del self._pending[: len(saves) or 1]

    async def _write(self, saves: list[Any]) -> None:
        await self._retried(partial(self._store.write, [save.changes for save in saves]))
        for save in saves:
            if save.session:
                self._sessions.tell(save.session, Saved(save.ticket))

    async def _fetch(self, session: str) -> None:
        try:
            items = await self._call(partial(self._store.read, session))
            self._directory.tell(Fetched(session, dict(items)))
        except StoreError as error:
            log.error("a session could not be read", session=session, error=str(error))
            self._directory.tell(Fetched(session, {}, str(error)))

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

    async def _retried(self, call: Callable[[], Any]) -> None:
        failed = False
        told: set[tuple[int, int]] = set()  # session, ticket
        while True:
            try:
                await self._call(call)
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
            return

    def _refuse(self, error: str) -> None:
        """Nothing can be written: answer who would read."""
        self._pending += self._mailbox.drain_nowait()
        reads = [each.session for each in self._pending if isinstance(each, Fetch)]
        self._pending = [each for each in self._pending if not isinstance(each, Fetch)]
        for session in reads:
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
