"""Order of ops: one FIFO queue per branch name, so that an array of ops is a program.

A task runs when it is first in the queue of every branch it touches; tasks on other branches are
not held up. Queues are keyed by name, not by branch: a fork may make the branch that the next op
of the same frame uses. Pure; this file does not know what a task does.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile
from typing import Generic, Protocol, TypeVar


class Touches(Protocol):
    """A task as a queue sees it."""

    @property
    def touched(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=Touches)


class OpQueues(Generic[T]):
    """The waiting and running tasks of one session.

    All work is linear in what a task touches, however many others wait. Tasks are known by id():
    each is in a queue, so ids are unique.
    """

    def __init__(self) -> None:
        # Linked by `OrderedDict`, because tasks leave from the middle too (a cancel).
        self._queues: dict[str, OrderedDict[int, T]] = {}
        self._tasks: dict[int, T] = {}  # in the order in which they came
        self._held: dict[int, int] = {}  # in how many queues a waiting task is not the first
        self._started: set[int] = set()

    def __len__(self) -> int:
        """Tasks that wait or run."""
        return len(self._tasks)

    def __contains__(self, task: T) -> bool:
        """Whether it waits or runs."""
        return self._tasks.get(id(task)) is task

    def add(self, task: T) -> None:
        """Queue a task behind everything that touches its branches."""
        ident = id(task)
        self._tasks[ident] = task
        held = 0
        for name in task.touched:
            queue = self._queues.setdefault(name, OrderedDict())
            held += bool(queue)
            queue[ident] = task
        self._held[ident] = held

    def may_start(self, task: T) -> bool:
        """Whether it waits and is first everywhere."""
        return self._held.get(id(task)) == 0

    def start(self, task: T) -> bool:
        """Mark `task` as running if it waits and is first everywhere."""
        if not self.may_start(task):
            return False
        ident = id(task)
        del self._held[ident]
        self._started.add(ident)
        return True

    def finish(self, task: T) -> list[T]:
        """The task is done, or is taken out of the queue; returns tasks that may start now."""
        ident = id(task)
        self._started.discard(ident)
        self._held.pop(ident, None)
        del self._tasks[ident]
        freed: list[T] = []
        for name in task.touched:
            queue = self._queues[name]
            first = next(iter(queue)) == ident
            del queue[ident]
            if not queue:
                del self._queues[name]
            elif first:
                head = next(iter(queue))
                self._held[head] -= 1  # it waits: what runs was first, and is so until it is done
                if not self._held[head]:
                    freed.append(queue[head])
        return freed

    def running(self, task: T) -> bool:
        return id(task) in self._started

    def behind(self, name: str) -> int:
        """How many tasks are queued on the branch, the running one included."""
        return len(self._queues.get(name, ()))

    def first(self, name: str) -> T | None:
        """The task that is first in the queue of a branch."""
        queue = self._queues.get(name)
        return next(iter(queue.values())) if queue else None

    def ahead(self, task: T, name: str) -> list[T]:
        """The tasks before `task`, which touches the branch, in its queue."""
        return list(takewhile(lambda other: other is not task, self._queues[name].values()))

    def on(self, names: Iterable[str] | None = None) -> list[T]:
        """Tasks that touch the branches (None: any), each once, in queue order."""
        if names is None:
            return list(self._tasks.values())
        seen: dict[int, T] = {}
        for name in dict.fromkeys(names):
            seen.update(self._queues.get(name, ()))
        return list(seen.values())
