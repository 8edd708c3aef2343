"""Turns a frame into tasks, after all checks that need no branch. Pure.

It does not know what an op does: its handler does (`ops/`).
"""

from collections.abc import Sequence

from ramify.actors.kit.turns import OP, Steps
from ramify.actors.session.ops.handler import Faults
from ramify.actors.session.ops.registry import AT_ONCE, HANDLERS, op_bytes, op_entries
from ramify.actors.session.queues.tasks import Bill, FrameRun, Task
from ramify.actors.session.sockets.reply_log import ReplyLog
from ramify.protocol.config import Limits
from ramify.protocol.errors import Forbidden, LimitExceeded
from ramify.protocol.wire import ClientMessage, Op


def take_apart(
    ops: Sequence[ClientMessage],
    frame: FrameRun,
    reply_log: ReplyLog,
    limits: Limits,
    *,
    write: bool,
    in_flight: int,
    queued: int,
    place: int | None,
) -> Steps[list[tuple[ClientMessage, list[Task]]]]:
    """Check a whole frame; each op with its tasks, none for one that was seen or that never waits.

    `in_flight`: what the client waits for already; `queued`: bytes of ops that wait; `place`: see
    `messages.Frame`. Raises RamifyError, and then nothing of the frame may run.
    """
    taken: list[tuple[ClientMessage, list[Task]]] = []
    count, size = in_flight, queued
    ids: list[int] = []
    for i, op in enumerate(ops):
        tasks: list[Task] = []
        if isinstance(op, Op):
            handler = HANDLERS.get(type(op))
            of_op = handler.task_count(op) if handler is not None else 0
            yield OP // 2 + op_entries(op) + 2 * of_op
            at_once = AT_ONCE.get(type(op))
            if not write and (at_once is None or not at_once.viewers):
                what = type(op).__name__.lower()
                raise Forbidden(
                    f"the view key does not allow `{what}`: open with the session's key",
                    details={"id": op.id},
                )
            if handler is not None:
                handler.check(op, Faults(op, limits, "$" if place is None else f"$[{place + i}]"))
            ids.append(op.id)
            if at_once is not None and at_once.looks_again:
                count += 1
            if op.id > reply_log.last:
                count += of_op
                if in_flight < count > limits.ops_in_flight:  # `cancel` and `credit` pass always
                    raise LimitExceeded(
                        f"{count} ops or more would be in flight: wait for replies, then send the "
                        "frame again",
                        details={"max": limits.ops_in_flight},
                    )
                if handler is not None:
                    tasks = handler.tasks(op, frame)
                    bill = Bill(op_bytes(op), len(tasks))
                    size += bill.size
                    for place_of, task in enumerate(tasks):
                        task.place, task.bill = place_of, bill
        taken.append((op, tasks))
    reply_log.admit(ids)
    if 0 < queued < size > limits.queued_op_bytes:  # a single frame always passes
        raise LimitExceeded(
            f"the ops of this session that wait would hold {size} bytes, at most "
            f"{limits.queued_op_bytes} are allowed: wait for replies, then send the frame again",
            details={"max": limits.queued_op_bytes},
        )
    return taken
