"""`set`: rename a branch, keep its KV warm, attach facts to it; without a branch, for the session."""

import msgspec

from ramify.actors.kit.memory import MESSAGE, TARGET, json_bytes, json_size
from ramify.actors.session.branches.tasks import FrameRun, Kind, Task
from ramify.actors.session.ops.handler import Faults, OpContext, OpHandler, one_entry
from ramify.protocol.errors import Unsupported
from ramify.protocol.wire import Ok, Set

_JSON = msgspec.json.Encoder()
KIND = Kind("set", renames=True)
META = 200  # bytes of JSON that are looked at in a microsecond


def _size(op: Set) -> int:
    return MESSAGE + TARGET + json_bytes(op.meta)


def _check(op: Set, faults: Faults) -> None:
    if op.branch is None and op.name is not None:
        faults.fail("name", "`name` needs a `branch`")
    if op.meta is not None:
        faults.limit("meta", len(_JSON.encode(op.meta)), faults.limits.meta_bytes, "bytes as JSON")


def _tasks(op: Set, frame: FrameRun) -> list[Task]:
    touched = [name for name in (op.branch, op.name) if name is not None]
    return [Task(KIND, op, frame, op.branch, touched, expects=0)]


def _run(ctx: OpContext, op: Set, task: Task) -> Ok:
    state = ctx.state
    if op.persist not in (None, "none") and not state.stored:
        raise Unsupported("this server saves no sessions (start it with `--store`): leave `persist` out")
    branch = ctx.target(task) if op.branch is not None else None
    name = op.name if branch is not None and op.name != branch.name else None
    if name is not None:
        state.check_new([name], moved=1)
    if op.meta is not None:
        state.annotate(branch, op.meta)
    if branch is not None and name is not None:
        ctx.publisher.rename(branch, name)
        state.rename(branch, name)
    if op.persist is not None:
        if branch is None:
            state.persist = op.persist
        else:
            branch.persist = op.persist
    if op.retain_s is not None:
        until = ctx.publisher.now + op.retain_s if op.retain_s else 0.0
        for each in [branch] if branch is not None else state.branches.values():
            each.retain_s = op.retain_s or None
            state.out.retained[each.handle] = until
    state.bump()
    if branch is None:
        return Ok(id=op.id, revision=state.revision)
    return ctx.ok(task, branch)


def _cost(ctx: OpContext, op: Set, task: Task) -> int:
    known = len(ctx.state.branches) // 3 if op.branch is None and op.retain_s is not None else 0
    return known + (json_size(op.meta) // META if op.meta is not None else 0)


HANDLER = OpHandler(Set, _tasks, _run, one_entry, _size, _check, cost=_cost)
