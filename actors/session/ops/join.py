"""`join`: what several branches generated last becomes input of another one; then they are dropped."""

import re
from collections.abc import Sequence
from typing import Any

from ramify.actors.session.branch import Branch
from ramify.actors.session.drafts import Shared
from ramify.actors.session.ops.home import Desk, Faults, Home
from ramify.actors.session.tasks import FrameRun, Task
from ramify.protocol.errors import LimitExceeded
from ramify.protocol.wire import Append, ChatMessage, Join, Ok

MOST = 1 << 22  # characters that a join makes: `each` may name a long text many times
FIELDS = 64  # how often it may

_FIELD = re.compile(r"\{(i|name|text)\}")


def _check(op: Join, faults: Faults) -> None:
    if len(set(op.from_)) != len(op.from_):
        faults.fail("from", "A branch is named twice")
    if op.branch in op.from_:
        faults.fail("branch", f"branch {op.branch!r} cannot be joined into itself")
    faults.limit("each", len(_FIELD.findall(op.each)), FIELDS, "fields")


def _tasks(op: Join, frame: FrameRun) -> list[Task]:
    return [Task("join", op, frame, op.branch, [op.branch, *op.from_], shared=Shared())]


def _run(desk: Desk, op: Join, task: Task) -> Ok | None:
    branch = desk.target(task)
    sources = [desk.state.branch(name) for name in op.from_]
    text = join_texts(op, [_answer(source) for source in sources])
    desk.state.meter.require(len(text))
    if op.role is None:
        added = Append(id=op.id, text=text)
    else:
        added = Append(id=op.id, messages=[ChatMessage(role=op.role, content=text)])

    def finish(cut: int | None) -> Ok:
        going = [] if op.keep else sources
        for source in going:
            desk.drop(source)
        result: dict[str, Any] = {"dropped": [source.name for source in going]}
        if cut is not None:
            result["rebased"] = cut
        return desk.ok(task, branch, result)

    return desk.texts.put(task, branch, added, [op.branch], finish, held=len(text))


def _answer(branch: Branch) -> str:
    answer = branch.answer()
    return answer.text if answer is not None else ""


def join_texts(op: Join, texts: Sequence[str]) -> str:
    """What the join appends. Raises LimitExceeded before it is made, if that would be too long."""
    pattern = _FIELD.split(op.each)  # text, field, text, field, ..., text
    parts, size = [op.prefix], len(op.prefix) + len(op.suffix)
    for i, (name, text) in enumerate(zip(op.from_, texts, strict=True), 1):
        values = {"i": str(i), "name": name, "text": text}
        each = [values[part] if at % 2 else part for at, part in enumerate(pattern)]
        size += sum(map(len, each))
        if size > MOST:
            raise LimitExceeded(
                f"the join would make more than {MOST} characters: join fewer or shorter texts",
                details={"max": MOST},
            )
        parts += each
    return "".join([*parts, op.suffix])


HOME = Home(_tasks, _run, _check)
