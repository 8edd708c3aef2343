"""Runs ops in order: which task is next, how each ends, its reply. Pure.

Tasks come in checked, wait in the queues of the branches that they touch (`queues`), and run (`ops/`)
when the session's turn has room for them (`Work`). Some end later: a generation, or long text that is
being tokenized. Each task gets its terminal reply here; then what waited for it runs.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Set

import msgspec

from ramify.actors.kit.turns import OP, SOCKET, Steps
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import Made, SessionState
from ramify.actors.session.branches.tasks import Prepared, Task
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.ops import HANDLERS
from ramify.actors.session.ops.handler import OpContext
from ramify.actors.session.ops.running.queues import Deadlines, OpQueues, Races
from ramify.actors.session.ops.scoring.selects import Selects
from ramify.actors.session.output.generations import Generations
from ramify.actors.session.sockets.publisher import Publisher, bare, error_message
from ramify.actors.session.sockets.view import Inspections
from ramify.actors.tokenizer.detokenizer import Detokenizer
from ramify.protocol.errors import Cancelled, DeadlineExceeded, RamifyError, Skipped
from ramify.protocol.wire import Done, Generate, Ok, ServerMessage

REFUSE, CANCEL = 25, 100  # what it costs to cancel an op that waits, or a generation (see `Work`)


class OpRunner:
    """The ops of one session. `len`: tasks that wait or run."""

    def __init__(
        self,
        state: SessionState,
        publisher: Publisher,
        writer: BranchWriter,
        detokenizer: Detokenizer,
        random_seed: Callable[[], int],
    ) -> None:
        self._state = state
        self._publisher = publisher
        self._queues = OpQueues()
        self._ready: deque[Task] = deque()  # they were first in their queues, and run in this order
        self._freed: list[Task] | None = None  # by the op that is under way: they come before the others
        self._midway = False  # in what an op appends
        self.queued = 0  # bytes held by ops that wait or run
        self._broken: RamifyError | None = None  # the engine; nothing is begun any more
        self.deadlines = Deadlines(self._queues)
        self.generations = Generations(
            state,
            writer,
            detokenizer,
            random_seed=random_seed,
            on_output=lambda branch: publisher.flush((branch,)),
            on_done=self._generation_done,
            on_cut=publisher.cut,
            on_refused=self.end,
        )
        self.selects = Selects(state, writer, self.generations, publisher, on_end=self.end)
        self.inspections = Inspections(state)
        self._races = Races(self._queues, state.branches)
        self.context = OpContext(
            state,
            writer,
            self.generations,
            self.selects,
            publisher,
            self._races.scored,
            self.inspections,
            self.end,
        )

    def __len__(self) -> int:
        return len(self._queues)

    def tasks(self) -> list[Task]:
        """The tasks that wait or run, in the order in which they came."""
        return self._queues.on()

    @property
    def due(self) -> bool:
        """Whether there is something to do: see `more`."""
        return bool(self._ready or self._races.due)

    @property
    def inside(self) -> bool:
        """Whether an op is half done."""
        return self._freed is not None or self._midway

    @property
    def busy(self) -> bool:
        """Whether an op runs that keeps a session without sockets alive."""
        return self.generations.busy or self.selects.busy or bool(self.context.prompts)

    def pause(self, client: str) -> None:
        """Pause the generations and selections of a client that is gone, until it is back."""
        self.generations.pause(client)
        self.selects.pause(client)

    def unpause(self, client: str) -> None:
        """Go on with what was paused of a client: it is back."""
        self.generations.unpause(client)
        self.selects.unpause(client)

    def expects(self, name: str) -> bool:
        """Whether a branch has this name, or an op that waits may make one."""
        return name in self._state.branches or self._queues.behind(name) > 0

    # --- in order --------------------------------------------------------------------------------

    def add(self, task: Task, arrived: float | None = None) -> None:
        """Queue a task; `start` runs it. The first one of an op (`place`) before the others.

        `arrived`: when its op came; None: now.
        """
        task.arrived = self._publisher.now if arrived is None else arrived
        self._queues.add(task)
        self._state.expects += task.expects
        self._races.add(task, task.arrived)
        if task.deadline_ms is not None:
            deadline = task.arrived + task.deadline_ms / 1e3
            self.deadlines.add(task, deadline)
            self._state.out.wake(deadline)
        bill = task.bill
        if bill is not None and not bill.held:  # one for all tasks of the op
            bill.held = True
            self._hold(bill.size)

    def _finish(self, task: Task) -> list[Task]:
        """Take a finished task out of its queues. Returns the tasks that may start now."""
        bill = task.bill
        if bill is not None:
            bill.left -= 1
            if not bill.left:
                self._hold(-bill.size)
        self._state.expects -= task.expects
        self._state.changed = True
        freed = self._queues.finish(task)
        self._races.finished(task, self._publisher.now)
        return freed

    def _hold(self, count: int) -> None:
        self.queued += count
        self._state.meter.add(count)

    def start(self, tasks: Iterable[Task]) -> None:
        """Run those of the tasks that are first in their queues, in the next `steps`."""
        if self._freed is not None:
            self._freed.extend(tasks)
        else:
            self._ready.extend(tasks)

    def more(self) -> Steps[None]:
        """Take the next work to do."""
        return self.steps() if self._ready else self._judge()

    def steps(self) -> Steps[None]:
        """Run the tasks that are ready, then those that these free. Each op says first what it costs."""
        ready = self._ready
        while ready:
            task = ready.popleft()
            yield self._cost(task)
            if not self._queues.may_start(task) or self._needs_prompt(task):
                continue
            self._queues.start(task)
            self._freed = []
            try:
                reply = self._run(task)
                if reply is not None and not isinstance(reply, Ok):
                    reply = yield from reply
            except RamifyError as error:
                self._fail(task, error)
                self._freed += self._finish(task)
            else:
                if reply is not None:
                    self._ran(task, reply)
            freed, self._freed = self._freed, None
            ready.extendleft(reversed(freed))

    def _ran(self, task: Task, reply: Ok) -> None:
        if not task.kind.silent:
            self._complete(task, reply)
        else:
            self._publisher.announce(task, reply)
        assert self._freed is not None
        self._freed += self._finish(task)
        if not self._followed(task):
            self._prefill(task)

    def _cost(self, task: Task) -> int:
        names = len(task.touched) * (4 if self._races else 1)
        cost = OP + names + SOCKET * len(self._publisher.subscribers)
        handler = HANDLERS[type(task.op)]
        return cost + handler.cost(self.context, task.op, task)

    def _needs_prompt(self, task: Task) -> bool:
        """Whether the task has to wait for a long prompt that is being rendered."""
        skipped = not task.frame.failed.keys().isdisjoint(task.touched)
        return self._broken is None and not skipped and self.context.prompts.hold(task)

    def _run(self, task: Task) -> Ok | Steps[Ok | None] | None:
        if task.frame.failed:
            self._check_earlier(task)
        if self._broken is not None:
            raise self._broken
        return HANDLERS[type(task.op)].run(self.context, task.op, task)

    def _check_earlier(self, task: Task) -> None:
        """Raises the error of a task on whose branches an earlier op of its frame has failed."""
        failed = [n for n in task.touched if n in task.frame.failed and n not in task.spared]
        if not failed:
            return
        cause = task.frame.failed[failed[0]]
        if cause is not None and task.kind.generates:  # of the spawn that was to make its branch
            raise cause
        raise Skipped(
            f"an earlier op of this frame failed on branch {failed[0]!r}",
            details={"branch": failed[0]},
        )

    def _followed(self, task: Task) -> bool:
        """Whether an op waits behind `task`, which has just finished."""
        return any(map(self._queues.behind, task.touched))

    def _prefill(self, task: Task) -> None:
        """Compute ahead what `task` has added, since no op waits for it."""
        branch = self._branch(task.branch) if task.kind.adds else None
        if branch is not None:
            self.generations.prefills.start(branch, self._publisher.now)

    # --- what ends later -------------------------------------------------------------------------

    def encoded(self, ticket: int, prepared: Made | None, failure: BaseException | None) -> Steps[None]:
        """Go on with an op whose long text was tokenized, or could not be, on all its branches."""
        held = self.context.prompts.encoded(ticket, prepared, failure)
        if held is not None:
            self.start(held)
            return
        if self.selects.encoded(ticket, prepared, failure):
            return
        assert prepared is None or isinstance(prepared, Prepared)
        for cost, apply in self.context.texts.encoded(ticket, prepared, failure):
            yield OP + cost
            task, end = apply()
            if isinstance(end, Generator):
                self._midway = True
                try:
                    end = yield from end
                except RamifyError as error:
                    end = bare(error)
                finally:
                    self._midway = False
            if end is not None:  # else what is appended is scored first
                self.end(task, end)
            yield from self.steps()

    def end(
        self, task: Task, end: Ok | Done | RamifyError, *, again: ServerMessage | None = None
    ) -> None:
        """End a running task with its reply or error. `again`: see `_complete`."""
        if isinstance(end, RamifyError):
            self._fail(task, end)
            self.start(self._finish(task))
            return
        self._complete(task, end, again=again)
        freed = self._finish(task)
        followed = self._followed(task)
        self.start(freed)
        if not followed:
            self._prefill(task)

    def _generation_done(self, task: Task, done: Done, text: str) -> None:
        if done.reason == "error":
            for name in task.touched:
                task.frame.failed[name] = None
        op = task.op
        if isinstance(op, Generate) and op.hidden:
            self.end(task, done)
        else:  # a client that was away may find the branch dropped: the repeated reply has the text
            self.end(task, done, again=msgspec.structs.replace(done, text=text))

    # --- ahead of their turn ---------------------------------------------------------------------

    def cancel(self, client: str, ids: Set[int]) -> Steps[list[Task]]:
        """Cancel ops of a client. Returns the tasks that this ended or will end."""
        return self._cancel(
            [task for task in self._queues.on() if task.frame.client == client and task.op.id in ids]
        )

    def cancel_generations(self, branches: Set[str] | None) -> Steps[list[Task]]:
        """Cancel the generations that run or wait on the branches (None: on all). See `cancel`."""
        tasks = [
            task
            for task in self._queues.on(branches)
            if task.kind.generates
            or (task.kind.silent and (branches is None or task.branch in branches))
        ]
        spawned = {id(task.op) for task in tasks if task.kind.silent}
        if spawned:  # the generations of a fork that will not be made
            taken = set(map(id, tasks))
            tasks += [t for t in self._queues.on() if id(t.op) in spawned and id(t) not in taken]
        return self._cancel(tasks)

    def cancel_generations_of(self, client: str) -> None:
        """Cancel the generations of a client that has gone."""
        mine = [task for task in self._queues.on() if task.frame.client == client]
        for _ in self._cancel([task for task in mine if task.kind.generates or task.kind.silent]):
            pass

    def cancel_subtree(self, branches: Set[str] | None) -> Steps[list[Task]]:
        """Cancel all ops that wait or run on these branches or their descendants (None: on all).

        `drop`s run, as they clean up. Other ops that wait for a cancelled one are skipped.
        """
        known = self._state.branches
        roots = [known[name] for name in branches or () if name in known]
        below = self._state.below(roots) if branches is not None else [*known.values()]
        inside = {branch.name for branch in below} | set(branches or ())
        tasks: list[Task] = []
        for task in self._queues.on():
            makes = task.kind.forks
            where = [task.branch] if makes else task.touched
            if not task.kind.cleans and (branches is None or not inside.isdisjoint(where)):
                tasks.append(task)
                inside.update(task.children if makes else ())
        for branch in below:
            self.generations.prefills.cancel(branch)
        return self._cancel(tasks, within=inside if branches is not None else None)

    def _judge(self) -> Steps[None]:
        """Stop the losers of each prune whose winners are known now.

        Called when nothing is ready any more, so that ties do not depend on the order of messages.
        """
        for losers, late in self._races.losing():
            yield from self._cancel(late, within=losers)

    def _cancel(self, tasks: list[Task], *, within: Set[str] | None = None) -> Steps[list[Task]]:
        """Answer tasks that wait, then stop generations that run.

        In this order: a generation that is not submitted yet ends at once, and what is behind it
        starts. `within`: the branches on which all is cancelled; ops on other branches that wait for one
        of the tasks are skipped.
        """
        running = [task for task in tasks if self._queues.running(task)]
        done: list[Task] = []
        freed: list[Task] = []
        for task in tasks:
            if self._queues.running(task):
                continue
            yield REFUSE + len(task.touched)
            if task not in self._queues:
                continue
            freed += self._finish(task)
            done.append(task)
            if within is not None:
                task.frame.failed.update((name, None) for name in task.touched if name not in within)
            if not task.kind.silent:
                self._refuse(task, Cancelled("cancelled before it ran"))
        for task in running:
            yield CANCEL
            now = self._publisher.now
            if self.generations.cancel(task, now) or self.selects.cancel(task):
                done.append(task)
        self.start(freed)
        return done

    # --- deadlines -------------------------------------------------------------------------------

    def expire(self) -> None:
        """End generations that wait and are past their deadline; asks to be called for the next one.

        One that the scheduler has is ended by the scheduler.
        """
        if not self.deadlines.heap:
            return
        now = self._publisher.now
        late = self.deadlines.passed(now)
        running = [task for task in late if self._queues.running(task)]
        waiting = [task for task in late if not self._queues.running(task)]
        if self.deadlines.next is not None:
            self._state.out.wake(self.deadlines.next)
        spawns = {id(task.op) for task in waiting}
        if spawns:  # else all that waits would be looked at, at each tick
            waiting += [t for t in self._queues.on() if t.kind.silent and id(t.op) in spawns]
        freed: list[Task] = []
        for task in waiting:
            freed += self._finish(task)
            if not task.kind.silent:
                self._fail(
                    task, DeadlineExceeded("the deadline passed before the generation could begin")
                )
        for task in running:  # now: what is not submitted ends at once, and what is behind it starts
            if not self.selects.expire(task):
                self.generations.expire(task, now)
        self.start(freed)

    def change_core(self, now: float) -> None:
        """Go on with what runs at another engine, which has the branches now."""
        self.selects.change_core()  # first: a generation that ends now may begin another one
        self.generations.change_core(now)

    def refuse(self, error: RamifyError) -> None:
        """Have every task that would run from now on fail with `error`: the engine is broken."""
        self._broken = error

    def fail(self, error: RamifyError) -> None:
        """End running tasks with `error`; fail or skip those that wait. Call it after `refuse`."""
        self.generations.fail(error, self._publisher.now)
        self.selects.fail(error)
        for task in self.context.texts.waiting():
            self.end(task, error)
        self.start(self.context.prompts.give_up())

    # --- terminal replies ------------------------------------------------------------------------

    def _complete(self, task: Task, reply: Ok | Done, *, again: ServerMessage | None = None) -> None:
        """Send the reply to a task. `again`: what is sent instead if it has to be sent once more."""
        branches = self._state.branches
        branch = branches.get(reply.branch or "")
        children = [branches[name] for name in task.children] if task.children else ()
        self._publisher.reply(
            task.frame.client, task.op.id, reply, branch, again=again, children=children
        )
        self._publisher.announce(task, reply)

    def _fail(self, task: Task, error: RamifyError) -> None:
        bare(error)  # it may be kept, and raised again
        failed = task.frame.failed
        if task.kind.silent:  # the generations report it
            failed.update(dict.fromkeys(task.children, error))
            return
        failed.update(dict.fromkeys(task.touched))  # reported now: what follows is skipped
        self._refuse(task, error)

    def _refuse(self, task: Task, error: RamifyError) -> None:
        ident = task.op.id
        message = error_message(error, ident=ident, branch=task.branch)
        self._publisher.reply(task.frame.client, ident, message, self._branch(task.branch))

    def _branch(self, name: str | None) -> SessionBranch | None:
        return self._state.branches.get(name or "")
