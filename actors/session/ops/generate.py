"""`generate`: on branches that there are, or with `n` on children that it forks first (the "spawn")."""

from ramify.actors.kit.memory import MESSAGE, NUMBER, TARGET, json_bytes, json_size
from ramify.actors.session.branches.tasks import FrameRun, Kind, Task
from ramify.actors.session.ops.fork import cost_of_children, make_children
from ramify.actors.session.ops.handler import Faults, OpContext, OpHandler
from ramify.protocol.wire import CONSTRAINTS, Constraint, Generate, Ok, names

LONGEST = 64  # letters of a branch's name
KIND = Kind("generate", generates=True)
START = 60  # what it costs to begin one (see `Work`)
SPAWN = Kind("fork", forks=True, silent=True)  # the children that `n` and `as` ask for


OUTPUT = 64  # tokens of an output that are expected at most: most end before they have to


def _entries(op: Generate) -> int:
    return len(op.as_ or ()) + len(names(op.branch))


def _size(op: Generate) -> int:
    size = MESSAGE + TARGET * (len(names(op.branch)) + op.n + len(op.as_ or ()))
    size += NUMBER * len(op.stop_token_ids) + sum(map(len, op.stop))
    return size + json_bytes(op.constraint)


def _children(op: Generate) -> list[str]:
    """The branches that the op makes; none if it generates on those that it names."""
    if op.as_ is not None:
        return list(op.as_)
    if op.n > 1:
        return [f"{names(op.branch)[0]}.{op.id}.{i + 1}" for i in range(op.n)]
    return []


def _check(op: Generate, faults: Faults) -> None:
    targets = names(op.branch)
    faults.limit("n", op.n, faults.limits.n)
    faults.limit("priority", op.priority, faults.limits.priority)
    if op.as_ is not None and len(op.as_) != op.n:
        faults.fail("as", f"`as` has {len(op.as_)} names for n = {op.n}")
    if (op.as_ is not None or op.n > 1) and len(targets) > 1:
        faults.fail("n", "`n` and `as` need a single branch")
    if op.constraint is not None:
        _check_constraint(op, op.constraint, faults)
    for child in _children(op):
        if len(child) > LONGEST:
            faults.fail("as", f"the name {child!r} would be longer than {LONGEST} characters: give `as`")
    if len(set(targets)) != len(targets):
        faults.fail("branch", "A branch is named twice")


def _check_constraint(op: Generate, constraint: Constraint, faults: Faults) -> None:
    given = [kind for kind in CONSTRAINTS if getattr(constraint, kind) is not None]
    if constraint.continue_ is not None and (given or constraint.after_thought):
        other = given[0] if given else "after_thought"
        faults.fail(f"constraint.{other}", f"`continue` stands alone: leave it or `{other}` out")
    if constraint.continue_ is False:
        return
    if len(given) != 1 and not constraint.continue_:
        kinds = ", ".join(f"`{kind}`" for kind in CONSTRAINTS)
        faults.fail("constraint", f"Give exactly one of {kinds}; or `continue` alone")
    if constraint.after_thought and constraint.grammar is not None:
        faults.fail(
            "constraint.after_thought",
            "`after_thought` does not go with a `grammar`: let the grammar allow the thought",
        )
    if op.ignore_eos:
        faults.fail("ignore_eos", "`ignore_eos` does not go with a `constraint`: it says where to end")
    if op.tool_choice not in ("auto", "none"):
        faults.fail("tool_choice", "A forced call and a `constraint` do not go together: leave one out")
    if not constraint.continue_:
        _check_size(constraint, given[0], faults)


def _check_size(constraint: Constraint, kind: str, faults: Faults) -> None:
    """Check a constraint of one `kind` against the limits."""
    limits = faults.limits
    sizes = {
        "regex": _bytes(constraint.regex or ""),
        "json_schema": json_size(constraint.json_schema),
        "grammar": _bytes(constraint.grammar or ""),
        "choices": sum(map(_bytes, constraint.choices or ())),
        "structural_tag": json_size(constraint.structural_tag),
    }
    most = limits.regex_bytes if kind == "regex" else limits.schema_bytes
    faults.limit(f"constraint.{kind}", sizes[kind], most, "bytes")
    for i, tag in enumerate(constraint.structural_tag.tags if constraint.structural_tag else ()):
        contents = ("regex", "json_schema", "choices")
        if sum(getattr(tag, each) is not None for each in contents) != 1:
            where = f"constraint.structural_tag.tags[{i}]"
            faults.fail(where, "Give a tag exactly one of `regex`, `json_schema`, `choices`")
    faults.limit("constraint.choices", len(constraint.choices or ()), limits.choices, "texts")


def _bytes(text: str) -> int:
    return len(text.encode())


def _count(op: Generate) -> int:
    spawns = op.as_ is not None or op.n > 1
    return op.n + 1 if spawns else len(names(op.branch))


def _tasks(op: Generate, frame: FrameRun) -> list[Task]:
    targets, children = names(op.branch), _children(op)
    on = children or targets
    expects = min(op.max_tokens, OUTPUT)
    tasks = [
        Task(KIND, op, frame, name, [name], expects=expects, index=i, deadline_ms=op.deadline_ms)
        for i, name in enumerate(on)
    ]
    if children:
        parent = targets[0]
        spawn = Task(SPAWN, op, frame, parent, [parent, *children], expects=0, children=children)
        tasks.insert(0, spawn)
    return tasks


def _run(ctx: OpContext, op: Generate, task: Task) -> Ok | None:
    if task.kind is SPAWN:
        branch = ctx.target(task, expect=op.expect)
        return make_children(ctx, task, branch, branch.position)
    expect = op.expect if op.as_ is None and op.n == 1 else None
    branch = ctx.target(task, expect=expect)
    ctx.generations.start(task, branch, ctx.publisher.now, scored=ctx.scored(branch.name))
    return None


def _cost(ctx: OpContext, op: Generate, task: Task) -> int:
    return cost_of_children(ctx, op, task) if task.kind is SPAWN else START


HANDLER = OpHandler(Generate, _tasks, _run, _entries, _size, _check, _count, _cost)
