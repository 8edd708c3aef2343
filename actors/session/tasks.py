"""From a frame to tasks: the checks that need no branch, and what each op touches.

An op with several branches becomes one task for each; `generate` with `n` becomes a fork and one
generation for each child. Tasks of one frame share a `FrameRun`, which remembers the branches
that failed. Pure.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from ramify.actors.session.calls.toolbox import Toolbox
from ramify.actors.session.drafts import Shared
from ramify.actors.session.ledger import Ledger
from ramify.actors.session.stops import StopSet
from ramify.actors.session.weights import op_bytes
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest, Forbidden, LimitExceeded, RamifyError
from ramify.protocol.wire import (
    Append,
    Cancel,
    ClientMessage,
    CloseSession,
    Drop,
    Fork,
    Generate,
    Join,
    Op,
    Open,
    Prune,
    Rollback,
    Select,
    Set,
    Tree,
    names,
)

_JSON = msgspec.json.Encoder()

Kind = Literal["append", "generate", "fork", "spawn", "rollback", "set", "drop", "unsupported"]


class FrameRun:
    """The ops that came in one frame, and how their client opened the session.

    `failed`: branches on which one of them failed; with the error where the op itself did not
    report it. `stops`: the stop strings of an op, prepared once
    for all the branches that it generates on.
    """

    __slots__ = ("_stops", "_tools", "client", "failed", "opened", "worked")

    def __init__(self, opened: Open) -> None:
        self.client = opened.who
        self.opened = opened
        self._tools: Toolbox | None = None  # made when a generation begins: `open` may bring thousands
        self.failed: dict[str, RamifyError | None] = {}
        self.worked = 0  # characters of its appends that were tokenized on the event loop
        self._stops: dict[int, StopSet] = {}

    @property
    def tools(self) -> Toolbox:
        """The tools that may be called."""
        if self._tools is None:
            self._tools = Toolbox(self.opened.tools)
        return self._tools

    def stops(self, op: Generate) -> StopSet:
        """The stop strings of `op`, which came in this frame."""
        known = self._stops.get(op.id)
        if known is None:
            known = self._stops[op.id] = StopSet(op.stop)
        return known


class Bill:
    """What an op holds in memory until the last of its tasks is done. `left`: how many are not."""

    __slots__ = ("left", "size")

    def __init__(self, size: int, left: int) -> None:
        self.size = size
        self.left = left


class Task:
    """One op on one branch (or one fork), queued on every branch it touches.

    `branch`: the target, which its terminal reply names. A "spawn" is the fork inside a
    `generate` with `n`: it sends no reply; its failure is reported by the generations.
    """

    __slots__ = (
        "arrived",
        "bill",
        "branch",
        "children",
        "frame",
        "index",
        "kind",
        "op",
        "shared",
        "touched",
    )

    def __init__(
        self,
        kind: Kind,
        op: Op,
        frame: FrameRun,
        branch: str | None,
        touched: Sequence[str],
        *,
        index: int = 0,
        children: Sequence[str] = (),
        shared: Shared | None = None,
    ) -> None:
        self.kind = kind
        self.op = op
        self.frame = frame
        self.branch = branch
        self.touched = tuple(dict.fromkeys(touched))
        self.index = index  # place among the op's targets: varies the seed
        self.children = tuple(children)
        self.shared = shared  # an append: what its branches have in common
        self.arrived = 0.0
        self.bill: Bill | None = None


def take_apart(
    ops: Sequence[ClientMessage],
    opened: Open,
    ledger: Ledger,
    limits: Limits,
    *,
    write: bool,
    in_flight: int,
    queued: int = 0,
) -> list[tuple[ClientMessage, list[Task]]]:
    """Check a whole frame; each op with its tasks, none for one that was seen or that never waits.

    `in_flight`: what the client waits for already; `queued`: bytes of ops that wait. Raises RamifyError,
    and then nothing of the frame may run.
    """
    frame = FrameRun(opened)
    taken: list[tuple[ClientMessage, list[Task]]] = []
    count, size = in_flight, queued
    ids: list[int] = []
    for i, op in enumerate(ops):
        tasks: list[Task] = []
        if isinstance(op, Op):
            if not write and not isinstance(op, Tree | CloseSession):
                what = type(op).__name__.lower()
                raise Forbidden(
                    f"the view key does not allow `{what}`: open with the session's key",
                    details={"id": op.id},
                )
            check_static(op, limits, f"$[{i}]" if len(ops) > 1 else "$")
            ids.append(op.id)
            if isinstance(op, Tree):
                count += 1
            if op.id > ledger.last:
                count += count_tasks(op)
                if in_flight < count > limits.ops_in_flight:  # `cancel` and `credit` pass always
                    raise LimitExceeded(
                        f"{count} ops or more would be in flight: wait for replies, then send the "
                        "frame again",
                        details={"max": limits.ops_in_flight},
                    )
                tasks = expand(op, frame)
                if tasks:
                    bill = Bill(op_bytes(op), len(tasks))
                    size += bill.size
                    for task in tasks:
                        task.bill = bill
        taken.append((op, tasks))
    ledger.admit(ids)
    if 0 < queued < size > limits.queued_op_bytes:  # a single frame always passes
        raise LimitExceeded(
            f"the ops of this session that wait would hold {size} bytes, at most "
            f"{limits.queued_op_bytes} are allowed: wait for replies, then send the frame again",
            details={"max": limits.queued_op_bytes},
        )
    return taken


def count_tasks(op: Op) -> int:
    """How many tasks `expand` makes of a checked op, before it makes them (at most; names repeat)."""
    match op:
        case Generate(n=n, as_=as_) if as_ is not None or n > 1:
            return n + 1
        case (
            Append(branch=branch) | Generate(branch=branch) | Drop(branch=branch) | Select(branch=branch)
        ):
            return 1 if isinstance(branch, str) else len(branch)
        case Tree() | Cancel() | CloseSession():
            return 0
        case _:
            return 1


def child_names(op: Generate, branch: str) -> list[str]:
    """The branches that `generate` makes of `branch`; none if it generates on it."""
    if op.as_ is not None:
        return list(op.as_)
    if op.n > 1:
        return [f"{branch}.{op.id}.{i + 1}" for i in range(op.n)]
    return []


def check_static(op: Op, limits: Limits, where: str) -> None:
    """Raise BadRequest or LimitExceeded for faults that can be seen without any branch."""

    def fail(field: str, message: str) -> None:
        path = f"{where}.{field}"
        raise BadRequest(f"{message} - at `{path}`", details={"path": path, "id": op.id})

    def limit(field: str, most: int, has: int, what: str) -> None:
        if has > most:
            raise LimitExceeded(
                f"`{field}` has {has} {what}: at most {most} - at `{where}.{field}`",
                details={"max": most, "id": op.id},
            )

    match op:
        case Append():
            given = [f for f in ("text", "messages", "tokens") if getattr(op, f) is not None]
            if len(given) != 1:
                fail(
                    given[1] if given else "text", "Give exactly one of `text`, `messages` and `tokens`"
                )
        case Generate():
            targets = names(op.branch)
            if op.n > limits.n:
                raise LimitExceeded(
                    f"`n` is {op.n}: at most {limits.n} - at `{where}.n`",
                    details={"max": limits.n, "id": op.id},
                )
            if op.as_ is not None and len(op.as_) != op.n:
                fail("as", f"`as` has {len(op.as_)} names for n = {op.n}")
            if (op.as_ is not None or op.n > 1) and len(targets) > 1:
                fail("n", "`n` and `as` need a single branch")
            for child in child_names(op, targets[0]):
                if len(child) > 64:
                    fail("as", f"the name {child!r} would be longer than 64 characters: give `as`")
            if len(set(targets)) != len(targets):
                fail("branch", "A branch is named twice")
        case Rollback():
            if (op.to is None) == (op.turns is None):
                fail("to", "Give exactly one of `to` and `turns`")
        case Fork():
            limit("as", limits.branches, len(op.as_), "names")
            if op.branch is None and op.at is not None:
                fail("at", "A new root has no position to fork at")
        case Set():
            if op.branch is None and op.name is not None:
                fail("name", "`name` needs a `branch`")
            if op.meta is not None:
                limit("meta", limits.meta_bytes, len(_JSON.encode(op.meta)), "bytes as JSON")
        case Drop():
            if len(set(names(op.branch))) != len(names(op.branch)):
                fail("branch", "A branch is named twice")
        case _:
            pass


def expand(op: Op, frame: FrameRun) -> list[Task]:
    """The tasks of a queued op, in the order they are queued. `tree`, `cancel`, `close` have none."""
    match op:
        case Append():
            targets = list(dict.fromkeys(names(op.branch)))
            shared = Shared()
            return [Task("append", op, frame, name, [name], shared=shared) for name in targets]
        case Generate():
            targets = names(op.branch)
            children = child_names(op, targets[0])
            if not children:
                return [Task("generate", op, frame, n, [n], index=i) for i, n in enumerate(targets)]
            spawn = Task("spawn", op, frame, targets[0], [targets[0], *children], children=children)
            return [
                spawn,
                *(Task("generate", op, frame, n, [n], index=i) for i, n in enumerate(children)),
            ]
        case Fork():
            source = [op.branch] if op.branch is not None else []
            return [Task("fork", op, frame, op.branch, [*source, *op.as_], children=op.as_)]
        case Rollback():
            return [Task("rollback", op, frame, op.branch, [op.branch])]
        case Set():
            touched = [name for name in (op.branch, op.name) if name is not None]
            return [Task("set", op, frame, op.branch, touched)]
        case Drop():
            return [Task("drop", op, frame, name, [name]) for name in names(op.branch)]
        case Select():
            return [Task("unsupported", op, frame, name, [name]) for name in names(op.branch)]
        case Join():
            return [Task("unsupported", op, frame, op.branch, [op.branch, *op.from_])]
        case Prune():
            into = names(op.into)
            return [Task("unsupported", op, frame, into[0], [*into, *op.from_])]
        case Tree():
            return []
        case _:
            return []
