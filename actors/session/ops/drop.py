"""`drop`: release branches."""

from ramify.actors.session.ops.home import Desk, Faults, Home
from ramify.actors.session.tasks import FrameRun, Task
from ramify.protocol.wire import Drop, Ok, names


def _check(op: Drop, faults: Faults) -> None:
    if len(set(names(op.branch))) != len(names(op.branch)):
        faults.fail("branch", "A branch is named twice")


def _tasks(op: Drop, frame: FrameRun) -> list[Task]:
    return [Task("drop", op, frame, name, [name]) for name in names(op.branch)]


def _run(desk: Desk, op: Drop, task: Task) -> Ok:
    branch = desk.target(task)
    desk.drop(branch)
    desk.state.bump()
    return Ok(id=op.id, branch=branch.name, revision=desk.state.revision)


HOME = Home(_tasks, _run, _check, lambda op: len(names(op.branch)))
