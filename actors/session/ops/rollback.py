"""`rollback`: move the head of a branch back, to a position or by turns."""

from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.tasks import FrameRun, Kind, Task
from ramify.actors.session.ops.handler import Faults, OpContext, OpHandler, one_entry, short
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Ok, Rollback

KIND = Kind("rollback")


def _check(op: Rollback, faults: Faults) -> None:
    if (op.to is None) == (op.turns is None):
        faults.fail("to", "Give exactly one of `to` and `turns`")


def _tasks(op: Rollback, frame: FrameRun) -> list[Task]:
    return [Task(KIND, op, frame, op.branch, [op.branch], expects=0)]


def _run(ctx: OpContext, op: Rollback, task: Task) -> Ok:
    branch = ctx.target(task)
    to = _place(branch, op)
    revision = ctx.state.bump()
    if to < branch.position:
        ctx.generations.prefills.cancel(branch)
        ctx.state.truncate(branch, to)
        branch.cut_back(revision, to)
        ctx.publisher.cut(branch, to)
    return ctx.ok(task, branch)


def _place(branch: SessionBranch, op: Rollback) -> int:
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
    branch.check_edge(to)
    return to


HANDLER = OpHandler(Rollback, _tasks, _run, one_entry, short, _check)
