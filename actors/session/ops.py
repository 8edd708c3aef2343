"""What each queued op does to a branch. Pure.

An op either completes at once (its reply is returned), or goes on and completes later (None): a
generation, or an append whose text is tokenized off the event loop. Errors are raised before
anything has changed.
"""

from collections.abc import Callable
from typing import Any

from ramify.actors.session.branch import Branch
from ramify.actors.session.generations import Generations
from ramify.actors.session.outbox import EncodeText
from ramify.actors.session.state import SessionState
from ramify.actors.session.tasks import Task
from ramify.actors.session.turns import Draft, Turns
from ramify.protocol.errors import BadRequest, Conflict, Unsupported
from ramify.protocol.wire import Append, Fork, Generate, Ok, Rollback, Set


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
        self._encoding: dict[int, tuple[Task, Branch, Draft]] = {}

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

    def encoded(self, ticket: int, tokens: list[list[int]], error: BaseException | None) -> Ok:
        """Tokens of an append that went through `EncodeText`. Raises RamifyError."""
        task, branch, draft = self._encoding.pop(ticket)
        if error is not None:
            raise BadRequest(f"the text cannot be tokenized: {error}")
        return self._apply(task, branch, draft, tokens)

    def encoding(self) -> list[Task]:
        """The appends whose text is being tokenized."""
        return [task for task, _, _ in self._encoding.values()]

    def task_of(self, ticket: int) -> Task:
        """The append that an `EncodeText` belongs to."""
        return self._encoding[ticket][0]

    # --- ops ---------------------------------------------------------------------------------

    def _append(self, task: Task) -> Ok | None:
        op = task.op
        assert isinstance(op, Append)
        branch = self._target(task)
        _expect(branch, op.expect)
        opened = task.frame.opened
        draft = self._turns.draft(branch, op, strict=opened.template == "strict", tools=opened.tools)
        if draft.long:
            ticket = self._state.next_id()
            self._encoding[ticket] = (task, branch, draft)
            self._state.out.encode.append(EncodeText(ticket, draft.parts))
            return None
        return self._apply(task, branch, draft, [self._turns.encode(part) for part in draft.parts])

    def _apply(self, task: Task, branch: Branch, draft: Draft, tokens: list[list[int]]) -> Ok:
        if draft.cut is not None:
            self._generations.cancel_prefill(branch)
        cut = self._turns.apply(branch, draft, tokens, task.op.id)
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
                raise BadRequest(f"branch {branch.name!r} has fewer than {op.turns} turns")
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


def _expect(branch: Branch, position: int | None) -> None:
    if position is not None and position != branch.position:
        raise Conflict(
            f"branch {branch.name!r} is at position {branch.position}, not {position}: "
            "read what changed, then send again",
            details={"position": branch.position},
        )
