"""After a restart, computes the KV of saved sessions before anybody comes back: the warm start.

The session that was used last comes first. Of each, the branch that was written to last is
computed, as a request that nobody waits for (`Submit.spare`): it runs in steps that have nothing
else to do, and in pages that are free. Then its branch is dropped: what was computed stays in the
radix tree, to be found by tokens, like all that was ever computed, and goes before everything that
was used. So no session is taken into memory, and nothing is held for anybody.

One request at a time: who comes waits for a chunk of one prompt at most. It ends with the sessions, with
`most` tokens, or when a branch does not fit into free pages.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from itertools import islice

import anyio
import msgspec
from anyio.abc import TaskStatus

from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Router
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed, MailboxFull
from ramify.actors.kit.relay import Relay
from ramify.actors.session.restore import Damaged, read_head, saved_tokens
from ramify.actors.store.base import Store
from ramify.protocol.messages import (
    SPARE,
    CacheMessage,
    CancelSession,
    DropSessions,
    ExtendBranch,
    Finished,
    OpenBranch,
    RequestMessage,
    SessionMessage,
    Submit,
    Tokens,
)
from ramify.protocol.plan import pack
from ramify.protocol.sampling import SamplingParams
from ramify.protocol.saved import HISTORY

MOST_SESSIONS = 4096  # that are looked at
log = get_log(__name__)


class Found(msgspec.Struct, frozen=True):
    """What is to be computed of a session."""

    namespace: str
    tokens: "array[int]"


class WarmStart:
    """See the module's top. `most`: tokens; None: as many as there are free pages.

    `opened()`: the store, for this alone, which is closed again. `takes(session)`: whether this process
    would take it up. `here(session)`: whether it is in memory. `numbers`: for sessions, which nobody
    else gets. `model`: whose tokens are computed (`SavedHead.model`).
    """

    def __init__(
        self,
        opened: Callable[[], Store],
        *,
        model: str,
        context: int,
        most: int | None,
        cache: Address[CacheMessage],
        scheduler: Address[RequestMessage],
        sessions: Router[SessionMessage],
        numbers: Iterator[int],
        takes: Callable[[str], bool],
        here: Callable[[str], bool],
        clock: Clock,
    ) -> None:
        self._opened = opened
        self._model = model
        self._context = context
        self._left = most
        self._cache = cache
        self._scheduler = scheduler
        self._must_cache: Relay[CacheMessage] = Relay()
        self._must_cache.connect(cache)
        self._must_scheduler: Relay[RequestMessage] = Relay()
        self._must_scheduler.connect(scheduler)
        self._sessions = sessions
        self._numbers = numbers
        self._takes = takes
        self._here = here
        self._clock = clock

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until there is nothing more to compute. A store that fails ends it, and nothing else."""
        task_status.started()
        since, computed, tokens = self._clock.now(), 0, 0
        try:
            async with aclosing(self._wanted()) as wanted:
                async for found in wanted:
                    finished = await self._compute(found)
                    if finished is None or finished.reason != "length":
                        break
                    computed += 1
                    tokens += finished.computed
        except MailboxClosed:  # the engine goes down
            return
        except Exception as error:
            log.warning("the warm start has ended early", error=str(error))
        if computed:
            seconds = round(self._clock.now() - since, 3)
            log.info("warm start", sessions=computed, tokens=tokens, seconds=seconds)

    async def _wanted(self) -> AsyncGenerator[Found, None]:
        """The branches to compute, as far as `most` reaches."""
        thread = ThreadPoolExecutor(1, "warm start")
        call = asyncio.get_running_loop().run_in_executor
        opening = thread.submit(self._opened)
        try:
            store = await asyncio.wrap_future(opening)
            for session in await call(thread, partial(_sessions, store, self._takes)):
                if self._here(session):
                    continue
                found = await call(thread, partial(_found, store, session, self._model))
                if found is None or not 0 < len(found.tokens) <= self._context:
                    continue
                if self._left is not None:
                    if len(found.tokens) > self._left:
                        return
                    self._left -= len(found.tokens)
                yield found
        finally:
            thread.submit(_close, opening)  # it may still be under way
            thread.shutdown(wait=False)

    async def _compute(self, found: Found) -> Finished | None:
        """The end of its request; None: a mailbox had no room for it, or its engine has gone."""
        number = next(self._numbers)
        handle = number << 32
        mailbox: Mailbox[SessionMessage] = Mailbox(f"warm start {number}", 16)
        self._sessions.add(number, mailbox)
        try:
            self._cache.tell(OpenBranch(handle, found.namespace))
            self._cache.tell(ExtendBranch(handle, pack(found.tokens)))
            self._scheduler.tell(
                Submit(
                    request=handle | 1,
                    branch=handle,
                    prompt=len(found.tokens),
                    max_tokens=0,
                    sampling=SamplingParams(),
                    priority=SPARE,
                    arrived=self._clock.now(),
                    spare=True,
                )
            )
            while True:
                for message in await mailbox.drain():
                    if not isinstance(message, Tokens):  # its engine has gone
                        return None
                    if message.finished:
                        return message.finished[0]
        except MailboxFull:  # there is much to do: nobody needs this
            return None
        finally:
            self._must_scheduler.tell(CancelSession(number))
            self._must_cache.tell(DropSessions([number]))
            self._sessions.remove(number)


def _close(opening: Future[Store]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _sessions(store: Store, takes: Callable[[str], bool]) -> list[str]:
    """The last used first, without those that go on by themselves and those that a server has."""
    free = (kept.session for kept in store.kept() if not kept.busy and not kept.live)
    wanted = filter(takes, (each for each in free if not each.startswith(HISTORY)))
    return list(islice(wanted, MOST_SESSIONS))


def _found(store: Store, session: str, model: str) -> Found | None:
    """None: there is nothing that can be computed here."""
    items = store.read(session)
    if not items:
        return None
    try:
        head = read_head(items)
        if head.model != model or not head.branches:
            return None
        last = max(head.branches, key=lambda branch: branch.top)
        return Found(head.namespace, saved_tokens(items, last.top))
    except Damaged as damaged:
        log.warning("a saved session is damaged", session=session, error=str(damaged))
        return None
