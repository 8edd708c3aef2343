"""`append`: input for one or several branches. Text that several of them get is tokenized once."""

from ramify.actors.kit.memory import MESSAGE, NUMBER, TARGET, json_bytes
from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.tasks import FrameRun, Kind, Shared, Task
from ramify.actors.session.ops.handler import CHARACTERS, Faults, OpContext, OpHandler
from ramify.protocol.pictures import MARK
from ramify.protocol.wire import Append, Ok, names

KIND = Kind("append", adds=True)


def _entries(op: Append) -> int:
    return len(names(op.branch)) + len(op.messages or ()) + len(op.marks) + len(op.images)


def _size(op: Append) -> int:
    size = MESSAGE + TARGET * len(names(op.branch)) + len(op.text or "") + NUMBER * len(op.tokens or ())
    size += 2 * NUMBER * len(op.marks) + sum(map(len, op.images))
    for message in op.messages or ():
        size += MESSAGE + len(message.content) + len(message.reasoning or "")
        size += json_bytes(message.tool_calls)
    return size


def _expects(op: Append) -> int:
    said = len(op.text or "") + sum(len(message.content) for message in op.messages or ())
    return len(op.tokens or ()) + said // CHARACTERS


def _check(op: Append, faults: Faults) -> None:
    given = [f for f in ("text", "messages", "tokens") if getattr(op, f) is not None]
    if len(given) != 1:
        faults.fail(given[1] if given else "text", "Give exactly one of `text`, `messages` and `tokens`")
    if not op.special and op.text is None:
        faults.fail("special", "`special` goes with `text`: in messages no control tokens count")
    if op.images:
        said = [op.text or "", *(each.content for each in op.messages or ())]
        marks = sum(text.count(MARK) for text in said)
        if marks != len(op.images):
            told = f"{len(op.images)} images need a U+FFFC each in `text` or the messages' contents"
            faults.fail("images", f"{told}, which have {marks}")
        if op.logprobs:
            faults.fail("images", "`images` do not go with `logprobs`")
    if any(each.message >= len(op.messages or ()) for each in op.marks):
        faults.fail("marks", "`marks` name messages of this `append`, by their number from 0")


def _tasks(op: Append, frame: FrameRun) -> list[Task]:
    targets = list(dict.fromkeys(names(op.branch)))
    shared, expects = Shared(), _expects(op)
    return [Task(KIND, op, frame, name, [name], expects=expects, shared=shared) for name in targets]


def _cost(ctx: OpContext, op: Append, task: Task) -> int:
    branch = ctx.state.branches.get(task.branch or "")
    return ctx.texts.cost(task, branch, op) if branch is not None else 0


def _run(ctx: OpContext, op: Append, task: Task) -> Ok | Steps[Ok] | None:
    branch = ctx.target(task, expect=op.expect)

    def finish(cut: int | None) -> Ok:
        return ctx.ok(task, branch, {"rebased": cut} if cut is not None else None)

    return ctx.texts.put(task, branch, op, names(op.branch), finish)


HANDLER = OpHandler(
    Append, _tasks, _run, _entries, _size, _check, lambda op: len(names(op.branch)), _cost
)
