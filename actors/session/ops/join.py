"""`join`: what several branches generated last becomes input of another one; then they are dropped."""

from typing import Any

from ramify.actors.session.branch import Branch
from ramify.actors.session.ops.handler import Faults, OpContext, OpHandler
from ramify.actors.session.pending_appends import Shared
from ramify.actors.session.tasks import FrameRun, Kind, Task
from ramify.protocol.joining import FIELDS, fields, join_texts
from ramify.protocol.wire import Append, ChatMessage, Join, Ok

KIND = Kind("join", adds=True)


def _check(op: Join, faults: Faults) -> None:
    if len(set(op.from_)) != len(op.from_):
        faults.fail("from", "A branch is named twice")
    if op.branch in op.from_:
        faults.fail("branch", f"branch {op.branch!r} cannot be joined into itself")
    faults.limit("each", fields(op.each), FIELDS, "fields")


def _tasks(op: Join, frame: FrameRun) -> list[Task]:
    return [Task(KIND, op, frame, op.branch, [op.branch, *op.from_], shared=Shared())]


def _run(ctx: OpContext, op: Join, task: Task) -> Ok | None:
    branch = ctx.target(task)
    sources = [ctx.state.branch(name) for name in op.from_]
    text = join_texts(op, [_answer(source) for source in sources])
    ctx.state.meter.require(len(text))
    if op.role is None:
        added = Append(id=op.id, text=text)
    else:
        added = Append(id=op.id, messages=[ChatMessage(role=op.role, content=text)])

    def finish(cut: int | None) -> Ok:
        going = [] if op.keep else sources
        if going:  # the reply waits for deltas of `branch`: names that go may come again before them
            ctx.publisher.settle(branch)
        for source in going:
            ctx.drop(source)
        result: dict[str, Any] = {"dropped": [source.name for source in going]}
        if cut is not None:
            result["rebased"] = cut
        return ctx.ok(task, branch, result)

    return ctx.texts.put(task, branch, added, [op.branch], finish, held=len(text))


def _answer(branch: Branch) -> str:
    answer = branch.answer()
    return answer.said if answer is not None else ""


HANDLER = OpHandler(Join, _tasks, _run, _check)
