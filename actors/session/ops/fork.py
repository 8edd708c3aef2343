"""`fork`: children at the head of a branch, or further back; or new roots."""

from ramify.actors.kit.memory import MESSAGE, TARGET
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.tasks import FrameRun, Kind, Task
from ramify.actors.session.ops.handler import Faults, OpContext, OpHandler
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Fork, Ok, Op

KIND = Kind("fork", forks=True)
CHILD = 4  # what it costs to make one (see `Work`)


def _entries(op: Fork) -> int:
    return 1 + len(op.as_)


def _size(op: Fork) -> int:
    return MESSAGE + TARGET * (1 + len(op.as_))


def _check(op: Fork, faults: Faults) -> None:
    faults.limit("as", len(op.as_), faults.limits.branches, "names")
    if op.branch is None and op.at is not None:
        faults.fail("at", "A new root has no position to fork at")


def _tasks(op: Fork, frame: FrameRun) -> list[Task]:
    source = [op.branch] if op.branch is not None else []
    return [Task(KIND, op, frame, op.branch, [*source, *op.as_], expects=0, children=op.as_)]


def cost_of_children(ctx: OpContext, op: Op, task: Task) -> int:
    """The cost of `make_children`, or of so many new roots."""
    return len(task.children) * (CHILD + len(ctx.publisher.subscribers) // 4)


def _run(ctx: OpContext, op: Fork, task: Task) -> Ok:
    if task.branch is None:
        state = ctx.state
        for root in state.roots(task.children):
            ctx.publisher.begin(root)
        state.bump()
        return Ok(id=op.id, position=0, revision=state.revision)
    branch = ctx.target(task)
    return make_children(ctx, task, branch, branch.position if op.at is None else op.at)


def make_children(ctx: OpContext, task: Task, branch: SessionBranch, at: int) -> Ok:
    """Fork the children of `task`, which share `branch` up to `at`."""
    state = ctx.state
    if at > branch.position:
        raise BadRequest(
            f"`at` is {at}, but branch {branch.name!r} ends at {branch.position}",
            details={"position": branch.position},
        )
    branch.check_edge(at)
    for child in state.fork(branch, task.children, at):
        ctx.publisher.begin(child)
    state.bump()
    return Ok(id=task.op.id, branch=branch.name, position=at, revision=state.revision)


HANDLER = OpHandler(Fork, _tasks, _run, _entries, _size, _check, cost=cost_of_children)
