"""`select`: typed in the protocol, and not served yet."""

from ramify.actors.session.ops.home import Desk, Home
from ramify.actors.session.tasks import FrameRun, Task
from ramify.protocol.errors import Unsupported
from ramify.protocol.wire import Ok, Select, names


def _tasks(op: Select, frame: FrameRun) -> list[Task]:
    return [Task("select", op, frame, name, [name]) for name in names(op.branch)]


def _run(desk: Desk, op: Select, task: Task) -> Ok | None:
    raise Unsupported(
        "this server does not run `select` yet: do it in the client with `append`, `generate`, `fork` "
        "and `drop`"
    )


HOME = Home(_tasks, _run, count=lambda op: len(names(op.branch)))
