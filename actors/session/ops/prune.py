"""`prune`: keep the best branches of several, by what they generated last; the others are dropped.

The winners stay, or move into other names: a beam's, or that of the branch they were forked off. A
source on which an op of the frame failed has lost; where too few are left, the prune is skipped.
"""

from collections.abc import Sequence
from typing import Any

from ramify.actors.kit.memory import MESSAGE, TARGET
from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.tasks import FrameRun, Kind, Race, Task
from ramify.actors.session.ops.handler import Faults, OpContext, OpHandler, reading, said_on
from ramify.protocol.errors import BadRequest, Skipped
from ramify.protocol.ranking import best_first, number_in, vote_of, votes
from ramify.protocol.wire import Ok, Prune

_LACKING = {
    "logprob": "has log-probabilities of its last generation: send the `prune` in the frame of the "
    "generations, or generate with `logprobs`",
    "number": "has a number in its last generation",
    "vote": "has said anything in its last generation",
}
KIND = Kind("prune")
READING = 30  # what it costs to find a number or a vote in a text (see `Work`)
PLACING = 10  # and to move a winner


def _entries(op: Prune) -> int:
    return 2 * len(op.from_) + len(op.score_from or op.from_) + len(op.targets)


def _size(op: Prune) -> int:
    return MESSAGE + TARGET * (1 + len(op.from_) + len(op.score_from or ()) + len(op.targets))


def _check(op: Prune, faults: Faults) -> None:
    for field, given in (("from", op.from_), ("into", op.targets)):
        if len(set(given)) != len(given):
            faults.fail(field, "A branch is named twice")
    if op.targets and op.winners != len(op.targets):
        faults.fail("into", f"`into` has {len(op.targets)} names for k = {op.winners}")
    if op.winners > len(op.from_):
        faults.fail("k", f"{op.winners} of {len(op.from_)} branches cannot be kept")
    if op.score_from is not None:
        if op.by == "first":
            faults.fail("score_from", "The first ones that end are kept: nothing is scored")
        if len(op.score_from) != len(op.from_):
            faults.fail(
                "score_from", f"`score_from` has {len(op.score_from)} names for {len(op.from_)} branches"
            )


def _tasks(op: Prune, frame: FrameRun) -> list[Task]:
    judges = op.score_from or op.from_
    sources = [*op.from_, *judges]
    touched = [*op.targets, *sources]
    spared = frozenset(sources) - {*op.targets}
    task = Task(KIND, op, frame, touched[0], touched, expects=0, spared=spared)
    if op.by == "first":
        task.race = Race(op.from_, op.targets, op.winners)
    elif op.by == "logprob":
        task.scored = tuple(dict.fromkeys(judges))
    return [task]


def _run(ctx: OpContext, op: Prune, task: Task) -> Steps[Ok]:
    failed = task.frame.failed
    judges = op.score_from or op.from_
    left = [(n, j) for n, j in zip(op.from_, judges, strict=True) if n not in failed and j not in failed]
    if len(left) < op.winners:
        lost = next(name for name in [*op.from_, *judges] if name in failed)
        raise Skipped(
            f"an earlier op of this frame failed on branch {lost!r}: too few are left",
            details={"branch": lost},
        )
    branches = [(ctx.state.branch(name), ctx.state.branch(judge)) for name, judge in left]
    if task.race is not None:
        task.race.decide(failed)  # all are through
        assert task.race.decided is not None
        winners, scores = [ctx.state.branch(name) for name in task.race.decided], None
    else:
        order, found = yield from _rank(op, [judge for _, judge in branches])
        winners = [branches[i][0] for i in order[: op.winners]]
        scores = {name: found[i] for i, (name, _) in enumerate(left)}
    return (yield from _settle(ctx, op, task, winners, scores))


def _rank(op: Prune, judges: Sequence[SessionBranch]) -> Steps[tuple[list[int], Sequence[float | None]]]:
    """Rank the sources by their judges. Returns the ranking and the scores. Raises BadRequest."""
    said: list[str] = []
    scores: Sequence[float | None]
    match op.by:
        case "number":
            numbers: list[float | None] = []
            for judge in judges:
                yield READING + reading(judge)
                numbers.append(number_in(said_on(judge)))
            scores = numbers
        case "vote":
            for judge in judges:
                yield READING + reading(judge)
                said.append(vote_of(said_on(judge)))
            scores = votes(said)
        case _:
            answers = [judge.answer() for judge in judges]
            scores = [answer.mean if answer is not None else None for answer in answers]
    if all(score is None for score in scores):
        raise BadRequest(f"no branch of `prune` by {op.by!r} {_LACKING[op.by]}")
    return best_first(scores, said), scores


def _settle(
    ctx: OpContext,
    op: Prune,
    task: Task,
    winners: Sequence[SessionBranch],
    scores: dict[str, float | None] | None,
) -> Steps[Ok]:
    """Move the winners, drop the rest."""
    state = ctx.state
    into = op.targets or [winner.name for winner in winners]
    moves = [(winner, name) for winner, name in zip(winners, into, strict=True) if winner.name != name]
    going: list[SessionBranch] = []
    if not op.keep:
        named = dict.fromkeys([*op.from_, *(op.score_from or ())]).keys()
        stay = set(into)
        going = [state.branches[name] for name in named if name in state.branches and name not in stay]
    new = [name for _, name in moves if name not in state.branches]
    state.check_new(new, moved=min(len(new), len(going)))
    yield PLACING * len(winners)
    sources = [winner.name for winner in winners]
    rebased = _move(ctx, winners, moves)
    yield from ctx.drop_all(going)
    task.branch = into[0]
    task.children = tuple(into[1:])
    kept: list[dict[str, Any]] = []
    for source, name in zip(sources, into, strict=True):
        one: dict[str, Any] = {"from": source, "into": name, "position": state.branches[name].position}
        kept.append(one | ({"rebased": rebased[name]} if name in rebased else {}))
    result: dict[str, Any] = {"kept": kept, "dropped": [branch.name for branch in going]}
    if scores is not None:
        result["scores"] = scores
    return ctx.ok(task, state.branches[into[0]], result)


def _move(
    ctx: OpContext, winners: Sequence[SessionBranch], moves: Sequence[tuple[SessionBranch, str]]
) -> dict[str, int]:
    """Move winners into other names, all at once. Returns, of each name that was a branch with another
    text, the position up to which that text stays."""
    state, publisher = ctx.state, ctx.publisher
    old = {name: state.branches[name].position for _, name in moves if name in state.branches}
    for branch in [*winners, *(state.branches[name] for name in old)]:  # before it holds something else
        ctx.generations.prefills.cancel(branch)
        publisher.settle(branch)
    revision = state.bump()
    rebased: dict[str, int] = {}
    for (_, name), same in zip(moves, state.place(moves), strict=True):
        branch = state.branches[name]
        if same is not None and same < old[name]:
            rebased[name] = same
            branch.cut_back(revision, same)
        publisher.place(branch)
        if branch.retain_s is not None:
            state.out.retained[branch.handle] = publisher.now + branch.retain_s
    return rebased


HANDLER = OpHandler(Prune, _tasks, _run, _entries, _size, _check)
