"""What each queued op does to a branch. Pure.

An op either completes at once (its reply is returned), or goes on and completes later (None): a
generation, or an append whose text is tokenized off the event loop. Errors are raised before
anything has changed.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from ramify.actors.session.branch import Branch
from ramify.actors.session.drafts import Prepared
from ramify.actors.session.generations import Generations
from ramify.actors.session.outbox import EncodeText
from ramify.actors.session.state import SessionState
from ramify.actors.session.tasks import Task
from ramify.actors.session.turns import Turns
from ramify.protocol.errors import BadRequest, Conflict, RamifyError, Unsupported
from ramify.protocol.wire import Append, Fork, Generate, Ok, Rollback, Set, names

ON_THE_LOOP = 4096  # characters that one frame may have tokenized on the event loop: some milliseconds


class OpRunner:
    """Runs tasks.

    `on_cut(branch, to)`: the branch was moved back; `on_rename(branch, name)` and `on_drop(branch)`
    are called before it happens.
    """

    def __init__(
        self,
        state: SessionState,
        turns: Turns,
        generations: Generations,
        *,
        on_cut: Callable[[Branch, int], None],
        on_rename: Callable[[Branch, str], None],
        on_drop: Callable[[Branch], None],
        on_new: Callable[[Branch], None],
    ) -> None:
        self._state = state
        self._turns = turns
        self._generations = generations
        self._on_cut = on_cut
        self._on_rename = on_rename
        self._on_drop = on_drop
        self._on_new = on_new
        self._encoding: dict[int, tuple[Hashable, list[tuple[Task, Branch]]]] = {}

    def run(self, task: Task, now: float) -> Ok | None:
        """Run a task that is first in its queues. Raises RamifyError."""
        match task.kind:
            case "append":
                return self._append(task)
            case "generate":
                self._generate(task, now)
                return None
            case "fork" | "spawn":
                return self._fork(task)
            case "rollback":
                return self._rollback(task)
            case "set":
                return self._set(task, now)
            case "drop":
                return self._drop(task)
            case "unsupported":
                what = type(task.op).__name__.lower()
                raise Unsupported(
                    f"this server does not run `{what}` yet: do it in the client with "
                    "`append`, `generate`, `fork` and `drop`"
                )

    def encoded(
        self, ticket: int, prepared: Prepared | None, error: BaseException | None
    ) -> list[tuple[Task, Ok | RamifyError]]:
        """What `EncodeText` came to, for each branch that waited for it."""
        situation, waiting = self._encoding.pop(ticket)
        result = _cannot_encode(error) if prepared is None else prepared
        shared = waiting[0][0].shared
        assert shared is not None
        del shared.tickets[situation]
        shared.prepared[situation] = result
        ends: list[tuple[Task, Ok | RamifyError]] = []
        for task, branch in waiting:
            try:
                ends.append((task, self._apply(task, branch, result)))
            except RamifyError as failure:
                ends.append((task, failure))
        return ends

    def encoding(self) -> list[Task]:
        """The appends whose text is being tokenized."""
        return [task for _, waiting in self._encoding.values() for task, _ in waiting]

    # --- ops ---------------------------------------------------------------------------------

    def _append(self, task: Task) -> Ok | None:
        op = task.op
        assert isinstance(op, Append)
        branch = self._target(task)
        _expect(branch, op.expect)
        shared, turns = task.shared, self._turns
        assert shared is not None
        strict = task.frame.opened.template == "strict"
        situation = turns.situation(branch, op, strict=strict)
        known = shared.prepared.get(situation)
        if known is not None:
            return self._apply(task, branch, known)
        if situation in shared.tickets:  # for another branch of this op
            self._encoding[shared.tickets[situation]][1].append((task, branch))
            return None
        prepare = partial(
            turns.prepare,
            branch,
            op,
            strict=strict,
            tools=task.frame.opened.tools,
            room=self._state.context if strict else turns.room(names(op.branch)),
        )
        size = turns.size(branch, op, strict=strict)
        if task.frame.worked + size > ON_THE_LOOP:
            ticket = shared.tickets[situation] = self._state.next_id()
            self._encoding[ticket] = (situation, [(task, branch)])
            self._state.out.encode.append(EncodeText(ticket, size, prepare))
            return None
        task.frame.worked += size
        try:
            prepared: Prepared | RamifyError = prepare()
        except RamifyError as error:
            prepared = error
        shared.prepared[situation] = prepared
        return self._apply(task, branch, prepared)

    def _apply(self, task: Task, branch: Branch, prepared: Prepared | RamifyError) -> Ok:
        if isinstance(prepared, RamifyError):
            raise prepared
        if prepared.draft.over_prompt or prepared.draft.cut is not None:
            self._generations.cancel_prefill(branch)
        cut = self._turns.apply(branch, prepared, task.op.id)
        revision = self._state.bump()
        if cut is not None:
            branch.cut_back(revision, cut)
            self._on_cut(branch, cut)
        result = {"rebased": cut} if cut is not None else None
        return self._ok(task, branch, result)

    def _generate(self, task: Task, now: float) -> None:
        op = task.op
        assert isinstance(op, Generate)
        branch = self._target(task)
        if not op.as_ and op.n == 1:
            _expect(branch, op.expect)
        self._generations.start(task, branch, now)

    def _fork(self, task: Task) -> Ok:
        op, state = task.op, self._state
        if task.branch is None:
            state.check_new(task.children)
            for name in task.children:
                self._on_new(state.root(name))
            state.bump()
            return Ok(id=op.id, position=0, revision=state.revision)
        branch = self._target(task)
        at = branch.position
        if isinstance(op, Fork) and op.at is not None:
            at = op.at
        elif isinstance(op, Generate):
            _expect(branch, op.expect)
        if at > branch.position:
            raise BadRequest(
                f"`at` is {at}, but branch {branch.name!r} ends at {branch.position}",
                details={"position": branch.position},
            )
        state.check_new(task.children)
        for child in state.fork(branch, task.children, at):
            self._on_new(child)
        state.bump()
        return Ok(id=op.id, branch=branch.name, position=at, revision=state.revision)

    def _rollback(self, task: Task) -> Ok:
        op = task.op
        assert isinstance(op, Rollback)
        branch = self._target(task)
        to = op.to
        if op.turns is not None:
            to = branch.turn_start(op.turns)
            if to is None:
                raise BadRequest(
                    f"branch {branch.name!r} has fewer than {op.turns} turns, or the template joined "
                    "the last one of them to the turn before it: roll back `to` a position"
                )
        assert to is not None
        if to > branch.position:
            raise BadRequest(
                f"`to` is {to}, but branch {branch.name!r} ends at {branch.position}",
                details={"position": branch.position},
            )
        revision = self._state.bump()
        if to < branch.position:
            self._generations.cancel_prefill(branch)
            self._state.truncate(branch, to)
            branch.cut_back(revision, to)
            self._on_cut(branch, to)
        return self._ok(task, branch)

    def _set(self, task: Task, now: float) -> Ok:
        op, state = task.op, self._state
        assert isinstance(op, Set)
        if op.persist:
            raise Unsupported("this server does not save branches to disk yet: leave `persist` out")
        branch = self._target(task) if op.branch is not None else None
        name = op.name if branch is not None and op.name != branch.name else None
        if name is not None:
            state.check_new([name], moved=1)
        if op.meta is not None:
            state.annotate(branch, op.meta)
        if branch is not None and name is not None:
            self._on_rename(branch, name)
            state.rename(branch, name)
        if op.retain_s is not None:
            until = now + op.retain_s if op.retain_s else 0.0
            for each in [branch] if branch is not None else state.branches.values():
                each.retain_s = op.retain_s or None
                state.out.retained[each.handle] = until
        state.bump()
        if branch is None:
            return Ok(id=op.id, revision=state.revision)
        return self._ok(task, branch)

    def _drop(self, task: Task) -> Ok:
        branch = self._target(task)
        self._generations.cancel_prefill(branch)
        self._on_drop(branch)
        self._state.drop(branch)
        self._state.bump()
        return Ok(id=task.op.id, branch=branch.name, revision=self._state.revision)

    def _target(self, task: Task) -> Branch:
        assert task.branch is not None
        return self._state.branch(task.branch)

    def _ok(self, task: Task, branch: Branch, result: dict[str, Any] | None = None) -> Ok:
        return Ok(
            id=task.op.id,
            branch=branch.name,
            position=branch.position,
            revision=self._state.revision,
            result=result,
        )


def _cannot_encode(error: BaseException | None) -> RamifyError:
    return (
        error if isinstance(error, RamifyError) else BadRequest(f"the text cannot be tokenized: {error}")
    )


def _expect(branch: Branch, position: int | None) -> None:
    if position is not None and position != branch.position:
        raise Conflict(
            f"branch {branch.name!r} is at position {branch.position}, not {position}: "
            "read what changed, then send again",
            details={"position": branch.position},
        )
