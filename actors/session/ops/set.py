"""`set`: rename a branch, keep its KV warm, attach facts to it; without a branch, for the session."""

from typing import NamedTuple

import msgspec

from ramify.actors.kit.memory import MESSAGE, TARGET, json_bytes, json_size
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.tasks import FrameRun, Kind, Task
from ramify.actors.session.ops.handler import Faults, OpContext, OpHandler
from ramify.protocol.errors import Unsupported
from ramify.protocol.wire import JsonObject, KvAction, KvHints, KvLease, KvRetain, Ok, Set

_JSON = msgspec.json.Encoder()
KIND = Kind("set", renames=True)
KINDS = ("retain", "pin", "demote", "prefetch", "share")  # actions of hints
LEASES = KINDS[:2]
MOST_LEASES = 16  # of one op
TOO_MANY = f"more than {MOST_LEASES} leases are asked for in one go: send fewer"
FULL = "the credential retains what it may (`--retain-share`, `--retain-leases`)"
META = 200  # bytes of JSON that are looked at in a microsecond


def _size(op: Set) -> int:
    actions = op.hints.actions if op.hints is not None else ()
    payloads = sum(TARGET + json_bytes(action.payload) for action in actions)
    return MESSAGE + TARGET + json_bytes(op.meta) + payloads


def _entries(op: Set) -> int:
    return 1 + (len(op.hints.actions) if op.hints is not None else 0)


def _check(op: Set, faults: Faults) -> None:
    for field in ("name", "hints"):
        if op.branch is None and getattr(op, field) is not None:
            faults.fail(field, f"`{field}` needs a `branch`")
    if op.meta is not None:
        faults.limit("meta", len(_JSON.encode(op.meta)), faults.limits.meta_bytes, "bytes as JSON")


def _tasks(op: Set, frame: FrameRun) -> list[Task]:
    touched = [name for name in (op.branch, op.name) if name is not None]
    return [Task(KIND, op, frame, op.branch, touched, expects=0)]


def _run(ctx: OpContext, op: Set, task: Task) -> Ok | None:
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
    if op.hints is not None:
        _hint(ctx, task, branch, op.hints)
        return None
    return ctx.ok(task, branch)


class _Plan(NamedTuple):
    """What an action does. `leases`: (tokens, seconds). `reason`: why it is rejected."""

    kind: str
    leases: list[tuple[int | None, float]] = []
    reason: str = ""


def _plan(action: KvAction) -> _Plan:
    kind = action.action_type.removeprefix("kv.")
    if kind not in KINDS:
        return _Plan("", reason=f"`action_type` is none of {', '.join(f'kv.{each}' for each in KINDS)}")
    if action.action_version.partition(".")[0] != "1":
        return _Plan(kind, reason="`action_version` must be 1.x")
    if kind not in LEASES:
        odd = next(iter(action.payload), None)
        told = (
            f"`payload.{odd}` is not served: the branch of the op or request is meant, and it stays here"
        )
        return _Plan(kind, reason="" if odd is None else told)
    try:
        if "directives" in action.payload:
            asked = msgspec.convert(action.payload, KvRetain).directives
        else:
            asked = [msgspec.convert(action.payload, KvLease)]
    except msgspec.ValidationError as error:
        return _Plan(kind, reason=f"`payload`: {error}")
    return _Plan(kind, [(each.tokens, each.seconds) for each in asked])


def _hint(ctx: OpContext, task: Task, branch: SessionBranch, hints: KvHints) -> None:
    """Pass a suggestion on to the cache. The reply follows when the cache has said what it did."""
    state, now = ctx.state, ctx.publisher.now
    plans = [_plan(action) for action in hints.actions]
    leases = [lease for plan in plans for lease in plan.leases]
    if len(leases) > MOST_LEASES:
        plans = [plan._replace(leases=[], reason=TOO_MANY) if plan.leases else plan for plan in plans]
        leases = []
    demotes = any(plan.kind == "demote" and not plan.reason for plan in plans)
    leases += [(None, 0.0)] if demotes else []
    for tokens, seconds in leases:
        if tokens is None:
            branch.retain_s = seconds or None
            state.out.retained.pop(branch.handle, None)

    def answer(found: list[int], tiers: list[int]) -> None:
        resident, kept = found[0], iter(found[1:])
        outcomes: list[JsonObject] = []
        for action, plan in zip(hints.actions, plans, strict=True):
            told = _outcome(plan, resident, branch.position, [next(kept, -1) for _ in plan.leases])
            if plan.kind == "prefetch" and told["outcome"] == "deferred":
                ctx.generations.prefills.start(branch, now)
            outcomes.append({"action_id": action.action_id, **told})
        envelope = {"protocol_version": "0.1", "message_id": hints.message_id, "outcomes": outcomes}
        ctx.end(task, ctx.ok(task, branch, {"kv_hints": envelope}))

    until = [(tokens, now + seconds if seconds else 0.0) for tokens, seconds in leases]
    ctx.inspections.ask([branch], answer, leases=until, demote=demotes)


def _outcome(plan: _Plan, resident: int, position: int, kept: list[int]) -> JsonObject:
    if plan.reason:
        return {"outcome": "rejected", "reason": plan.reason}
    if resident < 0 or -1 in kept:
        return {"outcome": "deferred", "reason": "no engine has the branch yet"}
    if plan.kind not in LEASES:
        if plan.kind == "prefetch" and resident < position - 1:
            return {"outcome": "deferred", "tokens": resident, "reason": "the rest is computed"}
        return {"outcome": "accepted" if resident else "missing", "tokens": resident}
    wanted = [min(tokens or position, position) if s else 0 for tokens, s in plan.leases]
    told = {"tokens": max(kept, default=0), "duration": max((s for _, s in plan.leases), default=0.0)}
    if all(has >= want for has, want in zip(kept, wanted, strict=True)):
        return {"outcome": "accepted", **told}
    if not any(kept):
        return {"outcome": "rejected", "reason": FULL}
    return {"outcome": "clipped", **told, "reason": FULL}


def _cost(ctx: OpContext, op: Set, task: Task) -> int:
    known = len(ctx.state.branches) // 3 if op.branch is None and op.retain_s is not None else 0
    return known + (json_size(op.meta) // META if op.meta is not None else 0)


HANDLER = OpHandler(Set, _tasks, _run, _entries, _size, _check, cost=_cost)
