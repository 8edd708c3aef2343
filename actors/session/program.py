"""Order of ops: one FIFO queue per branch name, so that an array of ops is a program.

A task runs when it is first in the queue of every branch it touches; tasks on other branches are
not held up. Queues are keyed by name, not by branch: a fork may make the branch that the next op
of the same frame uses. Pure; this file does not know what a task does.
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Touches(Protocol):
    """What a queue needs to know of a task."""

    @property
    def touched(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=Touches)


class Program(Generic[T]):
    """The waiting and running tasks of one session."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}
        self._waiting: set[int] = set()  # id() of tasks; each is in a queue, so ids are unique
        self._started: set[int] = set()

    def __len__(self) -> int:
        """Tasks that wait or run."""
        return len(self._waiting) + len(self._started)

    def __contains__(self, task: T) -> bool:
        """Whether it waits or runs."""
        return id(task) in self._waiting or id(task) in self._started

    def add(self, task: T) -> None:
        """Queue a task behind everything that touches its branches."""
        for name in task.touched:
            self._queues.setdefault(name, deque()).append(task)
        self._waiting.add(id(task))

    def start(self, task: T) -> bool:
        """Mark `task` as running if it waits and is first everywhere."""
        if id(task) not in self._waiting:
            return False
        if any(self._queues[name][0] is not task for name in task.touched):
            return False
        self._waiting.discard(id(task))
        self._started.add(id(task))
        return True

    def finish(self, task: T) -> list[T]:
        """The task is done, or is taken out of the queue; returns tasks that may start now."""
        self._started.discard(id(task))
        self._waiting.discard(id(task))
        heads: list[T] = []
        for name in task.touched:
            queue = self._queues[name]
            if queue[0] is task:
                queue.popleft()
                if queue and all(queue[0] is not head for head in heads):
                    heads.append(queue[0])
            else:
                queue.remove(task)
            if not queue:
                del self._queues[name]
        return heads

    def running(self, task: T) -> bool:
        return id(task) in self._started

    def behind(self, name: str) -> int:
        """How many tasks are queued on the branch, the running one included."""
        return len(self._queues.get(name, ()))

    def on(self, names: Iterable[str] | None = None) -> list[T]:
        """Tasks that touch the branches (None: any), each once, in queue order."""
        seen: dict[int, T] = {}
        for name in self._queues if names is None else names:
            for task in self._queues.get(name, ()):
                seen[id(task)] = task
        return list(seen.values())
