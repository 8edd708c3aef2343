"""Tokenizes long texts off the event loop: a few threads, and one queue that is shared fairly.

Owners take turns, and so do the sessions of one owner. So a session with many long texts delays only
itself, and an owner with many sessions too. The queue is bounded by size. An owner may use half of what
others leave of it; beyond that an append is answered `overloaded`. Where jobs may wait for what is slow,
the threads are shared in the same way. A session without a credential counts as an owner: a *party* is
either. This file does not know what a job does.
"""

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from ramify.protocol.errors import Overloaded

MOST = 64 << 20  # characters that wait
RETRY_MS = 1000

Queue = Literal["text", "pictures", "remote"]
Party = str | int
T = TypeVar("T")


def may_take(mine: int, others: int, places: int) -> bool:
    """Whether a party that has `mine` of the `places` may take one more.

    It may have half of what `others` leave, rounded up; one that has none may take whatever is free.
    """
    return mine < (places - others + 1) // 2


class Turnstile(Generic[T]):
    """First in, first out for each session; sessions of a party in turn; parties in turn. Pure."""

    def __init__(self) -> None:
        self._parties: OrderedDict[Party, OrderedDict[int, deque[T]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._parties)

    def put(self, party: Party, session: int, item: T) -> None:
        self._parties.setdefault(party, OrderedDict()).setdefault(session, deque()).append(item)

    def take(self, may: Callable[[Party], bool] = lambda _: True) -> T | None:
        """The next item of a party that `may`; None if there is none. O(parties that may not)."""
        party = next(filter(may, self._parties), None)
        if party is None:
            return None
        sessions = self._parties.pop(party)
        session, items = sessions.popitem(last=False)
        item = items.popleft()
        if items:
            sessions[session] = items  # behind the others
        if sessions:
            self._parties[party] = sessions
        return item

    def drop(self, party: Party, session: int) -> list[T]:
        """Take all of a session out."""
        sessions = self._parties.get(party, OrderedDict())
        items = list(sessions.pop(session, ()))
        if not sessions:
            self._parties.pop(party, None)
        return items


@dataclass(eq=False)
class Job(Generic[T]):
    """`done(result, error)` is called on the event loop. `queue`: see `Encoder`."""

    size: int
    run: Callable[[], T]
    done: Callable[[T | None, BaseException | None], None]
    party: Party = ""  # whose part of the queue it takes
    queue: Queue = "text"


class Encoder:
    """The threads and their queue. One for each process, on its event loop.

    `others`: those for jobs with pictures, and with such that are fetched: no text waits for a picture,
    and no picture for a server elsewhere. `shared`: no party has all threads, even if others need none.
    """

    def __init__(
        self,
        threads: int | None = None,
        most: int = MOST,
        others: "Mapping[Queue, Encoder] | None" = None,
        shared: bool = False,
    ) -> None:
        self._others = dict(others or {})
        self._threads = threads or max(1, min(4, (os.cpu_count() or 1) // 4))
        self._pool = ThreadPoolExecutor(self._threads, "tokenizer")
        self._waiting: Turnstile[Job[Any]] = Turnstile()
        self._size = 0  # of what waits
        self._sizes: Counter[Party] = Counter()  # of each party
        self._most = most
        self._shared = shared
        self._running: Counter[Party] = Counter()

    def submit(self, owner: str, session: int, job: Job[Any]) -> None:
        """Run `job` when it is its turn. Raises Overloaded."""
        if (other := self._others.get(job.queue)) is not None:
            other.submit(owner, session, job)
            return
        party = owner or session
        mine = self._sizes[party]
        left = self._most - (self._size - mine)
        full = self._waiting and self._size + job.size > self._most
        if full or (mine and mine + job.size > left // 2):
            raise Overloaded(
                "too much text waits to be tokenized: send it again later", retry_ms=RETRY_MS
            )
        job.party = party
        self._waiting.put(party, session, job)
        self._count(job, 1)
        self._next()

    def forget(self, owner: str, session: int) -> None:
        """The session is gone: drop its jobs that wait."""
        for job in self._waiting.drop(owner or session, session):
            self._count(job, -1)
        for other in self._others.values():
            other.forget(owner, session)

    def close(self) -> None:
        """Begin no more jobs."""
        for other in self._others.values():
            other.close()
        self._waiting = Turnstile()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count(self, job: Job[Any], sign: int) -> None:
        """Count a job that waits, or with -1 one that no longer does."""
        self._size += sign * job.size
        self._sizes[job.party] += sign * job.size
        if not self._sizes[job.party]:
            del self._sizes[job.party]

    def _may(self, party: Party) -> bool:
        if not self._shared:
            return True
        mine = self._running[party]
        return may_take(mine, self._running.total() - mine, self._threads)

    def _next(self) -> None:
        while self._running.total() < self._threads:
            job = self._waiting.take(self._may)
            if job is None:
                return
            self._count(job, -1)
            future = asyncio.get_running_loop().run_in_executor(self._pool, job.run)
            future.add_done_callback(partial(self._ended, job))
            # at last: who fails here must not take a thread from all others
            self._running[job.party] += 1

    def _ended(self, job: Job[Any], future: "asyncio.Future[Any]") -> None:
        self._running[job.party] -= 1
        if not self._running[job.party]:
            del self._running[job.party]
        if not future.cancelled():
            error = future.exception()
            job.done(None if error is not None else future.result(), error)
        self._next()
