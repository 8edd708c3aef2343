"""`select`: the best of several choices is appended. They are scored by the model (`selects`)."""

from ramify.actors.kit.memory import MESSAGE, NUMBER, TARGET
from ramify.actors.session.branches.tasks import ON_THE_LOOP, FrameRun, Kind, Task
from ramify.actors.session.ops.handler import Faults, OpContext, OpHandler
from ramify.actors.session.ops.scoring.selects import size_of
from ramify.protocol.wire import Ok, Select, names

KIND = Kind("select", generates=True)
START = 60  # what it costs to begin one, beside its text (see `Work`)


def _entries(op: Select) -> int:
    return len(names(op.branch)) + len(op.choices)


def _size(op: Select) -> int:
    size = MESSAGE + TARGET * len(names(op.branch))
    return size + NUMBER * len(op.choices) + sum(map(len, op.choices))


def _check(op: Select, faults: Faults) -> None:
    targets = names(op.branch)
    faults.limit("priority", op.priority, faults.limits.priority)
    if len(set(targets)) != len(targets):
        faults.fail("branch", "A branch is named twice")
    for i, choice in enumerate(op.choices):
        if not choice:
            faults.fail(f"choices[{i}]", "An empty choice has no tokens to score")


def _tasks(op: Select, frame: FrameRun) -> list[Task]:
    return [
        Task(KIND, op, frame, name, [name], expects=0, deadline_ms=op.deadline_ms)
        for name in names(op.branch)  # the branches that score a choice go again: nothing is expected
    ]


def _run(ctx: OpContext, op: Select, task: Task) -> Ok | None:
    ctx.selects.start(op, task, ctx.target(task, expect=op.expect))
    return None


def _cost(ctx: OpContext, op: Select, task: Task) -> int:
    return min(size_of(op), ON_THE_LOOP) // 2 + START


HANDLER = OpHandler(
    Select, _tasks, _run, _entries, _size, _check, lambda op: len(names(op.branch)), _cost
)
