"""What the file of an op declares, and what it works with when the op runs. Pure.

The way of an op: `check` finds faults before anything of the frame runs. `tasks` says which branches
the op touches, and so what it waits for. `run` does it, once its task is first in all their queues. An
op that touches no branch runs `AtOnce`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from ramify.actors.kit.memory import MESSAGE, TARGET
from ramify.actors.kit.turns import OP, SOCKET, Steps
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.branches.tasks import FrameRun, Task
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.ops.scoring.selects import Selects
from ramify.actors.session.ops.texts import Prompts, Texts
from ramify.actors.session.output.generations import Generations
from ramify.actors.session.sockets.publisher import Publisher
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.actors.session.sockets.view import Inspections
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest, Conflict, LimitExceeded
from ramify.protocol.wire import Ok, Op

if TYPE_CHECKING:
    from ramify.actors.session.ops.running.op_runner import OpRunner  # it imports the registry
    from ramify.actors.session.ops.tree import Trees

O_contra = TypeVar("O_contra", bound=Op, contravariant=True)


DROP = 15  # what it costs to release a branch (see `Work`)
CHUNKS = 5  # of a text that are put together, or read, in a microsecond
CHARACTERS = 4  # to a token, about: text is not tokenized to plan the KV pool


class Faults:
    """Raises the errors of an op's check. `where`: the op's path in the frame."""

    def __init__(self, op: Op, limits: Limits, where: str) -> None:
        self.limits = limits
        self._op = op
        self._where = where

    def fail(self, field: str, message: str) -> NoReturn:
        """Raises BadRequest."""
        path = f"{self._where}.{field}"
        raise BadRequest(f"{message} - at `{path}`", details={"path": path, "id": self._op.id})

    def limit(self, field: str, has: int, most: int, what: str = "") -> None:
        """Raises LimitExceeded if a field `has` more than `most` of `what`, or is more."""
        if has > most:
            more = f"has {has} {what}" if what else f"is {has}"
            raise LimitExceeded(
                f"`{field}` {more}: at most {most} - at `{self._where}.{field}`",
                details={"max": most, "id": self._op.id},
            )


@dataclass(eq=False, repr=False)
class OpContext:
    """The parts of a session that its ops work with. The time is `publisher.now`.

    `scored(branch)`: whether an op that waits wants the mean log-probability of what is generated there.
    `end(task, reply)`: see `OpRunner.end`.
    """

    state: SessionState
    writer: BranchWriter
    generations: Generations
    selects: Selects
    publisher: Publisher
    scored: Callable[[str], bool]
    inspections: Inspections
    end: Callable[[Task, Ok], None]

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.state, self.writer, self.publisher)
        self.texts = Texts(self.state, self.writer, self.generations, self.selects, self.publisher)

    def target(self, task: Task, *, expect: int | None = None) -> SessionBranch:
        """Find the task's branch. Raises NoBranch; Conflict if it is not at the position `expect`."""
        assert task.branch is not None
        branch = self.state.branch(task.branch)
        if expect is not None and expect != branch.position:
            raise Conflict(
                f"branch {branch.name!r} is at position {branch.position}, not {expect}: "
                "read what changed, then send again",
                details={"position": branch.position},
            )
        return branch

    def ok(self, task: Task, branch: SessionBranch, result: dict[str, Any] | None = None) -> Ok:
        """Make the reply to a task that has changed `branch`."""
        return Ok(
            id=task.op.id,
            branch=branch.name,
            position=branch.position,
            revision=self.state.revision,
            result=result,
        )

    def drop_cost(self) -> int:
        """The cost of `drop` (see `Work`)."""
        return DROP + SOCKET * len(self.publisher.subscribers)

    def drop_all(self, branches: Iterable[SessionBranch]) -> Steps[None]:
        """Release the branches one after the other."""
        for branch in branches:
            yield self.drop_cost()
            self.drop(branch)

    def drop(self, branch: SessionBranch) -> None:
        """Release a branch. What is due of it is sent first."""
        self.generations.prefills.cancel(branch)
        self.publisher.drop(branch)
        self.state.drop(branch)


def said_on(branch: SessionBranch) -> str:
    """The last text generated on a branch since it was forked; "" if there is none."""
    answer = branch.answer()
    return answer.said if answer is not None else ""


def reading(branch: SessionBranch) -> int:
    """The cost of `said_on` (see `Work`)."""
    answer = branch.answer()
    return len(answer.chunks) // CHUNKS if answer is not None else 0


class Hands(NamedTuple):
    """The parts of a session that ops which run at once work with. `end(why)`: the session is over."""

    state: SessionState
    publisher: Publisher
    runner: "OpRunner"
    trees: "Trees"
    end: Callable[[str], None]


def one_entry(op: Op) -> int:
    """Return `entries` of an op without lists."""
    return 1


def short(op: Op) -> int:
    """Return `size` of an op that names one branch at most."""
    return MESSAGE + TARGET


class AtOnce(NamedTuple, Generic[O_contra]):
    """An op that waits for no branch: it runs when its frame is read, before what follows it there.

    `op`: its wire type. `entries`, `size`: see `OpHandler`. `viewers`: who has the view key only may
    send it. `looks_again`: sent again it runs again, so its reply is not kept; and it counts as an op
    in flight. `last`: it runs after all ops of its frame. `cost`: see `Work`.
    """

    op: type[O_contra]
    run: Callable[[Hands, Subscriber, O_contra], Steps[None] | None]
    entries: Callable[[O_contra], int]
    size: Callable[[O_contra], int]
    viewers: bool = False
    looks_again: bool = False
    last: bool = False
    cost: Callable[[Hands, O_contra], int] = lambda hands, op: OP


class OpHandler(NamedTuple, Generic[O_contra]):
    """An op that waits for its branches.

    - `op`: its wire type.
    - `tasks`: one for each branch that it works on, in the order in which they are queued.
    - `task_count`: the most tasks there can be (names may repeat), before they are made.
    - `run`: does a task that is first in its queues. It returns the reply, or None if the task goes on
      and ends later (`OpRunner.end`). It raises RamifyError before anything has changed. If it may be
      too much for a turn of the loop, it returns `Steps`.
    - `entries`: the number of names, texts and messages in its lists, which `check` and `tasks` go
      through.
    - `size`: the bytes that it holds until its last task is done, in the units of `kit/memory.py`.
    - `cost`: of `run`, or of its first step, beyond a constant and the names that the task touches (see
      `Work`).

    What an op takes (`entries`, `size`) is declared without a default, so that no list is forgotten.
    """

    op: type[O_contra]
    tasks: Callable[[O_contra, FrameRun], list[Task]]
    run: Callable[[OpContext, O_contra, Task], Ok | Steps[Ok | None] | None]
    entries: Callable[[O_contra], int]
    size: Callable[[O_contra], int]
    check: Callable[[O_contra, Faults], None] = lambda op, faults: None
    task_count: Callable[[O_contra], int] = lambda op: 1
    cost: Callable[[OpContext, O_contra, Task], int] = lambda ctx, op, task: 0
