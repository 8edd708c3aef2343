"""The cache actor: drains its mailbox into a `RadixCache` and sends the replies.

A thin shell. An exception ends the actor, and with it the engine: a page count that is wrong means
KV that is wrong. MailboxFull from the scheduler counts as one too: it asks once per step and waits
for the answer, so a full mailbox there means that it has stopped.
Does not know what a message does to the tree.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from ramify.actors.cache.cache import RadixCache
from ramify.actors.kit.clock import Clock, MonotonicClock, Timer
from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed
from ramify.protocol import messages as m
from ramify.protocol.cluster import BLOCK, KvEvents, ListenKv, SeekBlocks, UnlistenKv

_AHEAD = 8  # branches of a turn whose blocks are fetched from the disk
NEWS_S = 0.05  # seconds for which changes are collected before routers are told
SLOW_S = 600.0  # seconds between two lines that say how slow the disk is
DIFFERS_S = 60.0  # and between two of a block that differs from what is computed

log = get_log(__name__)


class Disk(Protocol):
    """Moves blocks between host memory and a disk; answers each order with a `DiskResult`."""

    def submit(self, orders: Iterable[m.DiskOrder]) -> None: ...

    def renew(self, path: str, slots: int) -> None:
        """Use another host memory from now on."""


class Comparer(Protocol):
    """Compares blocks in host memory; answers each order with a `CompareResult`."""

    def submit(self, orders: Iterable[m.CompareOrder]) -> None: ...

    def renew(self, path: str, slots: int) -> None:
        """Use another host memory from now on."""


class CacheActor:
    """Serves `cache`.

    `routers`: the address that passes `KvEvents` on to listeners (`ListenKv`); None: there can be none.
    """

    def __init__(
        self,
        mailbox: Mailbox[m.CacheMessage],
        cache: RadixCache,
        scheduler: Address[m.Settled | m.Brought],
        sessions: Spread[m.SessionMessage],
        routers: Address[KvEvents] | None = None,
        *,
        disk: Disk | None = None,
        comparer: Comparer | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.mailbox = mailbox
        self.cache = cache
        self._scheduler = scheduler
        self._sessions = sessions
        self._routers = routers
        self._changed = anyio.Event()  # there is something to tell routers
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._disk = disk
        self._comparer = comparer
        self._extended: OrderedDict[int, None] = OrderedDict()  # or forked: their blocks may be fetched
        self._timer: Timer | None = None  # for who waits for the disk
        self._slow_said = -SLOW_S  # clock seconds at which it was said that the disk is slow
        self._differs_said = -DIFFERS_S

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until the mailbox is closed and empty. Raises what the cache raises."""
        if self._routers is None:
            task_status.started()
            await self._serve()
            return
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._announce, self._routers)
            task_status.started()
            try:
                await self._serve()
            except Exception as error:  # raised below as it is, not inside a group
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        while self.cache.pending_news:
            self._tell_news(self._routers)

    async def _serve(self) -> None:
        while True:
            try:
                messages = await self.mailbox.drain()
            except MailboxClosed:
                return
            for message in messages:
                self._handle(message)
            self._sessions.start()
            if self._disk is not None:
                self._serve_disk(self._disk)
            if self._comparer is not None and (compared := self.cache.canaries.take_orders()):
                self._comparer.submit(compared)
            if not self._changed.is_set() and self.cache.pending_news:
                self._changed.set()

    def _serve_disk(self, disk: Disk) -> None:
        """Order what is to be moved, and tell whose blocks have come."""
        waits = self.cache.waits
        for _ in range(min(_AHEAD, len(self._extended))):
            self.cache.fetch_ahead(self._extended.popitem(last=False)[0])
        if orders := waits.take_orders():
            disk.submit(orders)
        ready = waits.take_ready()
        if ready or self.cache.may_save:
            self._scheduler.tell(m.Brought(ready))
        if self._timer is not None:
            self._timer.cancel()
        due = waits.deadline
        self._timer = None if due is None else self._clock.call_at(due, self._overdue)

    def _moved(self, result: m.DiskResult) -> None:
        """An order was carried out. That the disk is too slow is said once in a while."""
        self.cache.waits.done(result)
        disk, now = self.cache.residency.stored.disk, self._clock.now()
        if disk is None or not disk.slow or now - self._slow_said < SLOW_S:
            return
        self._slow_said = now
        log.warning(
            "the disk of --kv-disk is slower than computing",
            read_tokens_s=round(BLOCK / disk.block_s) if disk.block_s else None,
            written_tokens_s=round(BLOCK / disk.write_s) if disk.write_s else None,
            computed_tokens_s=round(disk.rate),
        )

    def _compared(self, result: m.CompareResult) -> None:
        """A block was compared with what was computed in its place."""
        canaries, now = self.cache.canaries, self._clock.now()
        told = canaries.done(self.cache.residency.stored, result) and result.verdict == "differs"
        if told and now - self._differs_said >= DIFFERS_S:
            self._differs_said = now
            log.error(
                "a block of KV is not what is computed: it is dropped",
                difference=round(result.difference, 6),
                bound=result.bound,
                so_far=canaries.counts["differs"],
            )

    def _overdue(self) -> None:
        self._timer = None
        self.cache.waits.expire(self._clock.now())
        if self._disk is not None:
            self._serve_disk(self._disk)

    async def _announce(self, routers: Address[KvEvents]) -> None:
        """Send the changes to listeners, some times a second and in bounded parts, behind answers."""
        while True:
            await self._changed.wait()
            await self._clock.sleep_until(self._clock.now() + NEWS_S)
            while self.cache.pending_news:
                self._tell_news(routers)
                await anyio.lowlevel.checkpoint()
            self._changed = anyio.Event()

    def _tell_news(self, routers: Address[KvEvents]) -> None:
        for event in self.cache.news():
            routers.tell(event)

    def _extend(self, message: m.ExtendBranch) -> None:
        self.cache.extend_branch(message)
        self._wanted([message.branch])

    def _wanted(self, branches: list[int]) -> None:
        """Somebody will go on from here soon: their blocks may be fetched from the disk."""
        if self._disk is not None:
            self._extended.update(dict.fromkeys(branches))

    def _renew(self, message: m.RenewPool) -> None:
        count = message.state_slots or message.window_pages
        self.cache.renew(message.pages, count, message.host_blocks)
        for user in (self._disk, self._comparer):
            if user is not None:
                user.renew(message.host_memory, message.host_blocks)

    def _handle(self, message: m.CacheMessage) -> None:
        cache = self.cache
        match message:
            case m.Settle():
                self._scheduler.tell(cache.settle(message, self._clock.now()))
            case m.ExtendBranch():
                self._extend(message)
            case m.DiskResult():
                self._moved(message)
            case m.CompareResult():
                self._compared(message)
            case m.OpenBranch():
                cache.open_branch(message)
            case m.ForkBranch():
                cache.fork_branch(message)
                self._wanted(message.children[:1])  # all of them begin at one place
            case m.MoveBranch():
                cache.move_branch(message)
            case m.RetainBranches():
                cache.retain_branches(message)
            case m.DropBranches():
                cache.drop_branches(message)
            case m.DropSessions():
                cache.drop_sessions(message)
            case ListenKv():
                if self._routers is not None:
                    for event in cache.listen_kv(message):
                        self._routers.tell(event)
            case UnlistenKv():
                cache.unlisten_kv(message)
            case m.RenewPool():
                self._renew(message)
            case m.Reopen(session):
                cache.drop_sessions(m.DropSessions([session]), keep=False)
            case m.Inspect():
                self._sessions.put([(message.session, cache.inspect(message))])
            case SeekBlocks():
                self._sessions.put([(message.session, cache.lacking(message))])
