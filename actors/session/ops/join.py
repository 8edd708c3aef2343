"""`join`: typed in the protocol, and not served yet."""

from ramify.actors.session.ops.home import Desk, Home
from ramify.actors.session.tasks import FrameRun, Task
from ramify.protocol.errors import Unsupported
from ramify.protocol.wire import Join, Ok


def _tasks(op: Join, frame: FrameRun) -> list[Task]:
    return [Task("join", op, frame, op.branch, [op.branch, *op.from_])]


def _run(desk: Desk, op: Join, task: Task) -> Ok | None:
    raise Unsupported(
        "this server does not run `join` yet: do it in the client with `append`, `generate`, `fork` "
        "and `drop`"
    )


HOME = Home(_tasks, _run)
