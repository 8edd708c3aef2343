"""KV that is computed before anybody asks for it, in steps and pages that nobody needs.

A request that nobody waits for (`Submit.spare`) runs in steps that have nothing else to do, and in pages
that are free. Then its branch is dropped: what was computed stays in the radix tree, to be found by
tokens, and goes before everything that was used. One such request at a time: who comes waits for a chunk
of one prompt at most.

`SpareWork` computes the next prompts of sessions (`NextTurn.ahead`), the newest first. `WarmStart`
computes saved sessions after a restart: the one used last first, of each the branch that was written to
last. It takes no session into memory, and ends with the sessions, with `most` tokens, or when a branch
does not fit into free pages.
"""

import asyncio
from array import array
from collections import deque
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
from ramify.actors.session.branches.state import MakeTokens
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
from ramify.protocol.pictures import without_pictures
from ramify.protocol.plan import pack
from ramify.protocol.sampling import SamplingParams
from ramify.protocol.saved import HISTORY

MOST_SESSIONS = 4096  # that are looked at
WAITING = 64  # prompts that wait to be computed ahead
log = get_log(__name__)


class Found(msgspec.Struct, frozen=True):
    """What is to be computed of a session."""

    namespace: str
    tokens: "array[int]"


class SpareWork:
    """See the module's top. `numbers`: for sessions, which nobody else gets."""

    def __init__(
        self,
        *,
        context: int,
        cache: Address[CacheMessage],
        scheduler: Address[RequestMessage],
        sessions: Router[SessionMessage],
        numbers: Iterator[int],
        clock: Clock,
    ) -> None:
        self.context = context
        self._cache = cache
        self._scheduler = scheduler
        self._must_cache: Relay[CacheMessage] = Relay()
        self._must_cache.connect(cache)
        self._must_scheduler: Relay[RequestMessage] = Relay()
        self._must_scheduler.connect(scheduler)
        self._sessions = sessions
        self._numbers = numbers
        self.clock = clock
        self._one = anyio.Lock()
        self._prompts: deque[tuple[str, MakeTokens]] = deque(maxlen=WAITING)
        self._put = anyio.Event()

    def put(self, namespace: str, prompt: MakeTokens) -> None:
        """Compute a prompt at some time, unless many come after it. Another thread calls `prompt`."""
        self._prompts.append((namespace, prompt))
        self._put.set()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Compute what is put, until cancelled, or until the engine goes down."""
        task_status.started()
        while True:
            await self._put.wait()
            self._put = anyio.Event()
            while self._prompts:
                namespace, prompt = self._prompts.pop()
                try:
                    tokens = await anyio.to_thread.run_sync(prompt)
                    if 0 < len(tokens) < self.context:
                        await self.compute(namespace, tokens)
                except MailboxClosed:
                    return
                except Exception as error:  # the next turn computes it
                    log.warning("a prompt could not be computed ahead", error=str(error))

    async def compute(self, namespace: str, tokens: "array[int]") -> Finished | None:
        """The end of its request; None: a mailbox had no room for it, or its engine has gone.

        Up to the first picture, of which nobody has the pixels here.
        """
        tokens = without_pictures(tokens)
        async with self._one:
            return await self._compute(next(self._numbers), namespace, tokens)

    async def _compute(self, number: int, namespace: str, tokens: "array[int]") -> Finished | None:
        handle = number << 32
        mailbox: Mailbox[SessionMessage] = Mailbox(f"spare work {number}", 16)
        self._sessions.add(number, mailbox)
        try:
            self._cache.tell(OpenBranch(handle, namespace))
            self._cache.tell(ExtendBranch(handle, pack(tokens)))
            self._scheduler.tell(
                Submit(
                    request=handle | 1,
                    branch=handle,
                    prompt=len(tokens),
                    max_tokens=0,
                    sampling=SamplingParams(),
                    priority=SPARE,
                    arrived=self.clock.now(),
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


class WarmStart:
    """See the module's top. `most`: tokens; None: as many as there are free pages.

    `opened()`: the store, for this alone, which is closed again. `takes(session)`: whether this process
    would take it up. `here(session)`: whether it is in memory. `model`: whose tokens are computed
    (`SavedHead.model`).
    """

    def __init__(
        self,
        spare: SpareWork,
        opened: Callable[[], Store],
        *,
        model: str,
        most: int | None,
        takes: Callable[[str], bool],
        here: Callable[[str], bool],
    ) -> None:
        self._spare = spare
        self._opened = opened
        self._model = model
        self._left = most
        self._takes = takes
        self._here = here

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until there is nothing more to compute. A store that fails ends it, and nothing else."""
        task_status.started()
        clock = self._spare.clock
        since, computed, tokens = clock.now(), 0, 0
        try:
            async with aclosing(self._wanted()) as wanted:
                async for found in wanted:
                    finished = await self._spare.compute(found.namespace, found.tokens)
                    if finished is None or finished.reason != "length":
                        break
                    computed += 1
                    tokens += finished.computed
        except MailboxClosed:  # the engine goes down
            return
        except Exception as error:
            log.warning("the warm start has ended early", error=str(error))
        if computed:
            seconds = round(clock.now() - since, 3)
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
                if found is None or not 0 < len(found.tokens) <= self._spare.context:
                    continue
                if self._left is not None:
                    if len(found.tokens) > self._left:
                        return
                    self._left -= len(found.tokens)
                yield found
        finally:
            thread.submit(_close, opening)  # it may still be under way
            thread.shutdown(wait=False)


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
