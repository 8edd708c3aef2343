"""`prune`: typed in the protocol, and not served yet."""

from ramify.actors.session.ops.home import Desk, Home
from ramify.actors.session.tasks import FrameRun, Task
from ramify.protocol.errors import Unsupported
from ramify.protocol.wire import Ok, Prune, names


def _tasks(op: Prune, frame: FrameRun) -> list[Task]:
    into = names(op.into)
    return [Task("prune", op, frame, into[0], [*into, *op.from_])]


def _run(desk: Desk, op: Prune, task: Task) -> Ok | None:
    raise Unsupported(
        "this server does not run `prune` yet: do it in the client with `append`, `generate`, `fork` "
        "and `drop`"
    )


HOME = Home(_tasks, _run)
