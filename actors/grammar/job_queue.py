"""Who is compiled for next: owners take turns, and none of them has all the workers. Pure.

A hostile owner can fill its own part of the queue and keep all workers but one busy; whoever else asks
comes next.
"""

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

from ramify.protocol.errors import Overloaded

T = TypeVar("T")

RETRY_MS = 1000


class JobQueue(Generic[T]):
    """`most`: jobs that may wait; `most_each`: of one owner. `workers`: how many there are."""

    def __init__(self, workers: int, most: int, most_each: int) -> None:
        self._most = most
        self._most_each = most_each
        self._at_once = max(1, workers - 1)  # of one owner
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._count = 0

    def __len__(self) -> int:
        """Jobs that wait."""
        return self._count

    def add(self, owner: str, job: T) -> None:
        """Raises Overloaded if too many wait."""
        own = len(self._waiting.get(owner, ()))
        if self._count >= self._most or own >= self._most_each:
            raise Overloaded(
                f"{self._count} constraints wait to be compiled, {own} of yours: try again later",
                retry_ms=RETRY_MS,
            )
        self._waiting.setdefault(owner, deque()).append(job)
        self._count += 1

    def withdraw(self, owner: str, job: T) -> bool:
        """Take a job back that nobody wants any more. False if it does not wait here."""
        jobs = self._waiting.get(owner)
        if jobs is None or job not in jobs:
            return False
        jobs.remove(job)
        self._count -= 1
        if not jobs:
            del self._waiting[owner]
        return True

    def take(self) -> tuple[str, T] | None:
        """The next job and its owner, who then is behind all others; None if no job may run now."""
        for owner, jobs in self._waiting.items():
            if self._running[owner] < self._at_once:
                job = jobs.popleft()
                self._count -= 1
                self._running[owner] += 1
                if jobs:
                    self._waiting.move_to_end(owner)
                else:
                    del self._waiting[owner]
                return owner, job
        return None

    def finished(self, owner: str) -> None:
        """A job of `owner` that was taken has ended."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]

    def clear(self) -> list[T]:
        """Take all that wait."""
        jobs = [job for jobs in self._waiting.values() for job in jobs]
        self._waiting.clear()
        self._count = 0
        return jobs
