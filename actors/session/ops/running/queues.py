"""A frame becomes tasks (`take_apart`), which wait in one FIFO queue per branch name. Pure.

So an array of ops is a program. A task runs when it is first in the queue of every branch it touches;
tasks on other branches are not held up. Queues are keyed by name, not by branch: a fork may make the
branch that the next op of the same frame uses. What an op does, its handler knows.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ramify.actors.kit.turns import OP, Steps
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.branches.tasks import Bill, FrameRun, Task
from ramify.actors.session.ops import AT_ONCE, HANDLERS, op_bytes, op_entries
from ramify.actors.session.ops.handler import AtOnce, Faults, Hands
from ramify.actors.session.sockets.clients import ReplyLog
from ramify.actors.session.sockets.publisher import Publisher, error_message, refusals
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.protocol.config import Limits
from ramify.protocol.errors import Forbidden, LimitExceeded, RamifyError
from ramify.protocol.messages import Frame
from ramify.protocol.wire import ClientMessage, Credit, Op

if TYPE_CHECKING:
    from ramify.actors.session.ops.running.op_runner import OpRunner  # which has the queues

_CUT_SHORT = ("cancelled", "deadline", "error")


class OpQueues:
    """The waiting and running tasks of one session.

    All work is linear in what a task touches, however many others wait. Tasks are known by id():
    each is in a queue, so ids are unique.
    """

    def __init__(self) -> None:
        # Linked by `OrderedDict`, because tasks leave from the middle too (a cancel).
        self._queues: dict[str, OrderedDict[int, Task]] = {}
        self._tasks: dict[int, Task] = {}  # in the order in which they came
        self._held: dict[int, int] = {}  # in how many queues a waiting task is not the first
        self._started: set[int] = set()

    def __len__(self) -> int:
        """Tasks that wait or run."""
        return len(self._tasks)

    def __contains__(self, task: Task) -> bool:
        """Whether a task waits or runs."""
        return self._tasks.get(id(task)) is task

    def add(self, task: Task) -> None:
        """Queue a task behind everything that touches its branches."""
        ident = id(task)
        self._tasks[ident] = task
        held = 0
        for name in task.touched:
            queue = self._queues.setdefault(name, OrderedDict())
            held += bool(queue)
            queue[ident] = task
        self._held[ident] = held

    def may_start(self, task: Task) -> bool:
        """Whether a task waits and is first in all its queues."""
        return self._held.get(id(task)) == 0

    def start(self, task: Task) -> bool:
        """Mark a task as running if it waits and is first in all its queues. Returns whether it does."""
        if not self.may_start(task):
            return False
        ident = id(task)
        del self._held[ident]
        self._started.add(ident)
        return True

    def finish(self, task: Task) -> list[Task]:
        """Take a task out of its queues: it is done or dropped. Returns tasks that may start now."""
        ident = id(task)
        self._started.discard(ident)
        self._held.pop(ident, None)
        del self._tasks[ident]
        freed: list[Task] = []
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

    def running(self, task: Task) -> bool:
        return id(task) in self._started

    def behind(self, name: str) -> int:
        """How many tasks are queued on a branch, the running one included."""
        return len(self._queues.get(name, ()))

    def first(self, name: str) -> Task | None:
        """The first task in the queue of a branch."""
        queue = self._queues.get(name)
        return next(iter(queue.values())) if queue else None

    def ahead(self, task: Task, name: str) -> list[Task]:
        """The tasks before `task`, which touches the branch, in its queue."""
        return list(takewhile(lambda other: other is not task, self._queues[name].values()))

    def on(self, names: Iterable[str] | None = None) -> list[Task]:
        """The tasks that touch these branches (None: any), each once, in queue order."""
        if names is None:
            return list(self._tasks.values())
        seen: dict[int, Task] = {}
        for name in dict.fromkeys(names):
            seen.update(self._queues.get(name, ()))
        return list(seen.values())


class Deadlines:
    """The deadlines of generations that wait or run. `len` counts some that have ended, too."""

    def __init__(self, queues: OpQueues) -> None:
        self._queues = queues
        self.heap: list[tuple[float, int, Task]] = []
        self._arrivals = 0  # so that equal deadlines are not compared by their tasks

    def __len__(self) -> int:
        return len(self.heap)

    def add(self, task: Task, deadline: float) -> None:
        if len(self.heap) > 64 + 2 * len(self._queues):  # most of them ended long before
            self.heap = [entry for entry in self.heap if entry[2] in self._queues]
            heapq.heapify(self.heap)
        self._arrivals += 1
        heapq.heappush(self.heap, (deadline, self._arrivals, task))

    def passed(self, now: float) -> list[Task]:
        """Take out the tasks that are late."""
        late: list[Task] = []
        while self.heap and (self.heap[0][0] <= now or self.heap[0][2] not in self._queues):
            task = heapq.heappop(self.heap)[2]
            if task in self._queues:
                late.append(task)
        return late

    @property
    def next(self) -> float | None:
        """The first deadline that is left."""
        return self.heap[0][0] if self.heap else None


class Races:
    """Tells the prunes of one session that wait what happens on their branches. `branches`: by name.

    One by "first" learns which branches have finished, so that the others can be stopped. One by
    "logprob" needs the log-probabilities of what is generated there.
    """

    def __init__(self, queues: OpQueues, branches: dict[str, SessionBranch]) -> None:
        self._queues = queues
        self._branches = branches
        self._running: dict[int, Task] = {}  # by id()
        self.due: dict[int, Task] = {}  # those that have heard something, by id() too
        self._scored: Counter[str] = Counter()  # by how many prunes

    def __bool__(self) -> bool:
        """Whether a prune waits that has to hear of each task that ends."""
        return bool(self._running)

    def scored(self, branch: str) -> bool:
        """Whether a prune waits for the mean log-probability of what is generated there."""
        return branch in self._scored

    def add(self, task: Task, now: float) -> None:
        """Note a task that was queued."""
        if task.scored:
            self._scored.update(task.scored)
        if task.race is not None:
            self._running[id(task)] = task
            self._tell(task.touched, now)

    def finished(self, task: Task, now: float) -> None:
        """Note a task that has left its queues."""
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
        """Find the losing branches of each prune that was just decided, and the tasks that run there."""
        while self.due:
            _, task = self.due.popitem()
            if task.race is not None and task.race.decide(task.frame.failed):
                losers = task.race.losers
                late = {id(t): t for name in losers for t in self._queues.ahead(task, name)}
                yield set(losers), list(late.values())


def _whole(branch: SessionBranch | None) -> bool:
    """Whether the branch's last generation came to its own end."""
    return branch is not None and branch.answer() is not None and branch.reason not in _CUT_SHORT


def take_apart(
    ops: Sequence[ClientMessage],
    frame: FrameRun,
    reply_log: ReplyLog,
    limits: Limits,
    *,
    write: bool,
    in_flight: int,
    queued: int,
    place: int | None,
) -> Steps[list[tuple[ClientMessage, list[Task]]]]:
    """Check a whole frame; each op with its tasks, none for one that was seen or that never waits.

    `in_flight`: what the client waits for already; `queued`: bytes of ops that wait; `place`: see
    `messages.Frame`. Raises RamifyError, and then nothing of the frame may run.
    """
    taken: list[tuple[ClientMessage, list[Task]]] = []
    count, size = in_flight, queued
    ids: list[int] = []
    for i, op in enumerate(ops):
        tasks: list[Task] = []
        if isinstance(op, Op):
            handler = HANDLERS.get(type(op))
            of_op = handler.task_count(op) if handler is not None else 0
            yield OP // 2 + op_entries(op) + 2 * of_op
            at_once = AT_ONCE.get(type(op))
            if not write and (at_once is None or not at_once.viewers):
                what = type(op).__name__.lower()
                raise Forbidden(
                    f"the view key does not allow `{what}`: open with the session's key",
                    details={"id": op.id},
                )
            if handler is not None:
                handler.check(op, Faults(op, limits, "$" if place is None else f"$[{place + i}]"))
            ids.append(op.id)
            if at_once is not None and at_once.looks_again:
                count += 1
            if op.id > reply_log.last:
                count += of_op
                if in_flight < count > limits.ops_in_flight:  # `cancel` and `credit` pass always
                    raise LimitExceeded(
                        f"{count} ops or more would be in flight: wait for replies, then send the "
                        "frame again",
                        details={"max": limits.ops_in_flight},
                    )
                if handler is not None:
                    tasks = handler.tasks(op, frame)
                    bill = Bill(op_bytes(op), len(tasks))
                    size += bill.size
                    for place_of, task in enumerate(tasks):
                        task.place, task.bill = place_of, bill
        taken.append((op, tasks))
    reply_log.admit(ids)
    if 0 < queued < size > limits.queued_op_bytes:  # a single frame always passes
        raise LimitExceeded(
            f"the ops of this session that wait would hold {size} bytes, at most "
            f"{limits.queued_op_bytes} are allowed: wait for replies, then send the frame again",
            details={"max": limits.queued_op_bytes},
        )
    return taken


class FrameRunner:
    """Runs the frames of a session's sockets, op by op. `hands`: for ops that run at once."""

    def __init__(
        self, state: SessionState, publisher: Publisher, runner: "OpRunner", hands: Hands
    ) -> None:
        self._state = state
        self._publisher = publisher
        self._runner = runner
        self._hands = hands

    def run(self, subscriber: Subscriber, frame: Frame) -> Steps[None]:
        """Run a frame, all of which is checked before any op of it runs."""
        ops = frame.ops
        if not ops:
            return
        reply_log = self._publisher.reply_log(subscriber.client, subscriber.write)
        if frame.limit is not None:
            known = frame.limit
            error = LimitExceeded(known.message, details=known.details, retry_ms=known.retry_ms)
            self._refuse(subscriber, reply_log, ops, error)
            return
        try:
            taken = yield from take_apart(
                ops,
                FrameRun(subscriber.opened, lambda: subscriber.tools),
                reply_log,
                self._state.limits,
                write=subscriber.write,
                # Who does not read must stop.
                in_flight=len(self._runner) + subscriber.held + len(subscriber.trees),
                queued=self._runner.queued,
                place=frame.place,
            )
        except RamifyError as error:
            self._refuse(subscriber, reply_log, ops, error)
            return
        runner = self._runner
        last: list[tuple[AtOnce[Any], Op]] = []
        for op, tasks in taken:
            match op:
                case Credit():
                    yield OP
                    self._credit(subscriber, op)
                case Op() if (at_once := AT_ONCE.get(type(op))) is not None:
                    yield from runner.steps()
                    if self._admit(subscriber, reply_log, op, 1, again=at_once.looks_again):
                        last.append((at_once, op))
                        if not at_once.last:
                            yield from self._run(*last.pop(), subscriber)
                case Op():
                    silent = [task.kind.silent for task in tasks]
                    if self._admit(subscriber, reply_log, op, silent.count(False)):
                        for task in tasks:
                            yield 2 + len(task.touched) * (3 if task.race is not None else 1)
                            runner.add(task)
                        runner.start(tasks)  # later: an append sees whether a generation follows
                case _:
                    pass
        yield from runner.steps()
        for each in last:
            yield from self._run(*each, subscriber)

    def _run(self, at_once: AtOnce[Any], op: Op, subscriber: Subscriber) -> Steps[None]:
        yield at_once.cost(self._hands, op)
        more = at_once.run(self._hands, subscriber, op)
        if more is not None:
            yield from more
        yield from self._runner.steps()

    def _admit(
        self, subscriber: Subscriber, reply_log: ReplyLog, op: Op, replies: int, *, again: bool = False
    ) -> bool:
        """Whether to run `op`, which will get `replies` replies.

        An op that was seen before is not run. Its replies so far are sent again. `again`: it is run
        again once it has been answered.
        """
        if again and op.id <= reply_log.last:
            return not reply_log.waits(op.id)
        try:
            stored = reply_log.seen(op.id)
        except RamifyError as error:
            subscriber.out.append(error_message(error, ident=op.id))
            return False
        if stored is not None:
            for reply in stored:
                branch = self._state.branches.get(getattr(reply, "branch", None) or "")
                subscriber.reply(branch, reply)
            return False
        reply_log.begin(op.id, replies)
        return True

    def _refuse(
        self, subscriber: Subscriber, reply_log: ReplyLog, ops: list[ClientMessage], error: RamifyError
    ) -> None:
        """Answer a frame of which nothing runs. An op that was seen before has run, or will: it gets its
        replies so far again, as in any other frame, and no second end.
        """
        new: list[ClientMessage] = []
        for op in ops:
            at_once = AT_ONCE.get(type(op)) if isinstance(op, Op) else None
            if not isinstance(op, Op) or op.id > reply_log.last or (at_once and at_once.looks_again):
                new.append(op)
            else:
                self._admit(subscriber, reply_log, op, 1)
        subscriber.out.extend(refusals(error, new))

    def _credit(self, subscriber: Subscriber, op: Credit) -> None:
        if not self._runner.expects(op.branch):
            return  # nobody may come of that name, and who sends names at random must not fill memory
        subscriber.credit(op.branch, op.upto, most=self._state.limits.ops_in_flight)
        branch = self._state.branches.get(op.branch)
        if branch is not None:
            self._publisher.stream(subscriber, (branch,))
