"""`select`: the best of several choices is appended. They are scored by the model (`selects`)."""

from ramify.actors.session.ops.home import Desk, Faults, Home
from ramify.actors.session.tasks import FrameRun, Task
from ramify.protocol.wire import Ok, Select, names


def _check(op: Select, faults: Faults) -> None:
    targets = names(op.branch)
    if len(set(targets)) != len(targets):
        faults.fail("branch", "A branch is named twice")
    for i, choice in enumerate(op.choices):
        if not choice:
            faults.fail(f"choices[{i}]", "An empty choice has no tokens to score")


def _tasks(op: Select, frame: FrameRun) -> list[Task]:
    return [Task("select", op, frame, name, [name]) for name in names(op.branch)]


def _run(desk: Desk, op: Select, task: Task) -> Ok | None:
    desk.selects.start(op, task, desk.target(task, expect=op.expect))
    return None


HOME = Home(_tasks, _run, _check, lambda op: len(names(op.branch)))
