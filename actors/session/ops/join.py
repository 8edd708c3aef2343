"""`join`: what several branches generated last becomes input of another one; then they are dropped."""

from collections.abc import Generator
from typing import Any

from ramify.actors.kit.memory import MESSAGE, TARGET
from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.tasks import FrameRun, Kind, Shared, Task
from ramify.actors.session.ops.handler import CHARACTERS, Faults, OpContext, OpHandler, reading, said_on
from ramify.protocol.joining import FIELDS, MOST, fields, join_texts, too_long
from ramify.protocol.wire import Append, ChatMessage, Join, Ok

KIND = Kind("join", adds=True)
READING = 5  # what it costs to look at a source (see `Work`)
READ = 2000  # characters that are put together in a microsecond
JOINED = 32  # tokens of each source that are expected


def _entries(op: Join) -> int:
    return 1 + len(op.from_)


def _size(op: Join) -> int:
    return MESSAGE + TARGET * (1 + len(op.from_)) + len(op.prefix) + len(op.each) + len(op.suffix)


def _check(op: Join, faults: Faults) -> None:
    if len(set(op.from_)) != len(op.from_):
        faults.fail("from", "A branch is named twice")
    if op.branch in op.from_:
        faults.fail("branch", f"branch {op.branch!r} cannot be joined into itself")
    faults.limit("each", fields(op.each), FIELDS, "fields")


def _tasks(op: Join, frame: FrameRun) -> list[Task]:
    expects = (len(op.prefix) + len(op.suffix)) // CHARACTERS + JOINED * len(op.from_)
    touched = [op.branch, *op.from_]
    return [Task(KIND, op, frame, op.branch, touched, expects=expects, shared=Shared())]


def _run(ctx: OpContext, op: Join, task: Task) -> Steps[Ok | None]:
    branch = ctx.target(task)
    sources = [ctx.state.branch(name) for name in op.from_]
    said, size, shown = [], 0, "{text}" in op.each
    for source in sources:
        yield READING + (reading(source) if shown else 0)
        text = said_on(source) if shown else ""
        said.append(text)
        size += len(text)
        if size > MOST:
            raise too_long()
    yield size // READ
    text = join_texts(op, said)
    ctx.state.meter.require(len(text))
    if op.role is None:
        added = Append(id=op.id, text=text)
    else:
        added = Append(id=op.id, messages=[ChatMessage(role=op.role, content=text)])

    def finish(cut: int | None) -> Steps[Ok]:
        going = [] if op.keep else sources
        if going:  # the reply waits for deltas of `branch`: names that go may come again before them
            ctx.publisher.settle(branch)
        yield from ctx.drop_all(going)
        result: dict[str, Any] = {"dropped": [source.name for source in going]}
        if cut is not None:
            result["rebased"] = cut
        return ctx.ok(task, branch, result)

    yield ctx.texts.cost(task, branch, added)
    reply = ctx.texts.put(task, branch, added, [op.branch], finish, held=len(text))
    return (yield from reply) if isinstance(reply, Generator) else reply


HANDLER = OpHandler(Join, _tasks, _run, _entries, _size, _check)
