"""`drop`: release branches."""

from ramify.actors.kit.memory import MESSAGE, TARGET
from ramify.actors.session.branches.tasks import FrameRun, Kind, Task
from ramify.actors.session.ops.handler import Faults, OpContext, OpHandler
from ramify.protocol.wire import Drop, Ok, names

KIND = Kind("drop", cleans=True)


def _entries(op: Drop) -> int:
    return len(names(op.branch))


def _size(op: Drop) -> int:
    return MESSAGE + TARGET * len(names(op.branch))


def _check(op: Drop, faults: Faults) -> None:
    if len(set(names(op.branch))) != len(names(op.branch)):
        faults.fail("branch", "A branch is named twice")


def _tasks(op: Drop, frame: FrameRun) -> list[Task]:
    return [Task(KIND, op, frame, name, [name], expects=0) for name in names(op.branch)]


def _cost(ctx: OpContext, op: Drop, task: Task) -> int:
    return ctx.drop_cost()


def _run(ctx: OpContext, op: Drop, task: Task) -> Ok:
    branch = ctx.target(task)
    ctx.drop(branch)
    ctx.state.bump()
    return Ok(id=op.id, branch=branch.name, revision=ctx.state.revision)


HANDLER = OpHandler(Drop, _tasks, _run, _entries, _size, _check, _entries, _cost)
