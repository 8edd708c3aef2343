"""Tells waiting prunes what happens on the branches that they wait for. Pure.

A prune by "first" learns which branches have finished, so that the others can be stopped. A prune by
"logprob" needs the log-probabilities of what is generated there. The work is linear in the branches that
the starting and ending tasks touch.
"""

from collections import Counter
from collections.abc import Collection, Iterator

from ramify.actors.session.branches.branch import Branch
from ramify.actors.session.queues.op_queues import OpQueues
from ramify.actors.session.queues.tasks import Task

_CUT_SHORT = ("cancelled", "deadline", "error")


class Races:
    """The prunes of one session that wait. `branches`: by name."""

    def __init__(self, queues: OpQueues[Task], branches: dict[str, Branch]) -> None:
        self._queues = queues
        self._branches = branches
        self._running: dict[int, Task] = {}  # by id()
        self.due: dict[int, Task] = {}  # those that have heard something, by id() too
        self._scored: Counter[str] = Counter()  # by how many prunes

    def __bool__(self) -> bool:
        """Whether one waits that is to hear of each task that ends."""
        return bool(self._running)

    def scored(self, branch: str) -> bool:
        """Whether a prune waits for the mean log-probability of what is generated there."""
        return branch in self._scored

    def add(self, task: Task, now: float) -> None:
        """A task was queued."""
        if task.scored:
            self._scored.update(task.scored)
        if task.race is not None:
            self._running[id(task)] = task
            self._tell(task.touched, now)

    def finished(self, task: Task, now: float) -> None:
        """A task has left its queues."""
        for name in task.scored:
            self._scored[name] -= 1
            if not self._scored[name]:
                del self._scored[name]
        self._running.pop(id(task), None)
        self.due.pop(id(task), None)
        if self._running:
            self._tell(task.touched, now)

    def _tell(self, names: Collection[str], now: float) -> None:
        for name in names:
            task = self._queues.first(name)
            if task is not None and task.race is not None:
                task.race.through(name, now, whole=_whole(self._branches.get(name)))
                self.due[id(task)] = task

    def losing(self) -> Iterator[tuple[set[str], list[Task]]]:
        """Of each prune that was just decided: the losing branches, and tasks that run there."""
        while self.due:
            _, task = self.due.popitem()
            if task.race is not None and task.race.decide(task.frame.failed):
                losers = task.race.losers
                late = {id(t): t for name in losers for t in self._queues.ahead(task, name)}
                yield set(losers), list(late.values())


def _whole(branch: Branch | None) -> bool:
    """Whether its last generation came to its own end."""
    return branch is not None and branch.answer() is not None and branch.reason not in _CUT_SHORT
