"""`join` and `prune` where no server does them: over the texts of branches that are kept here.

What they say is that of docs/protocol.md, but `logprob`: endpoints do not tell it of what they stream.
"""

from collections.abc import Sequence
from typing import Any

from ramify.clients.program.api_branch import ApiBranch
from ramify.protocol.errors import BadRequest, NoBranch, Unsupported
from ramify.protocol.joining import join_texts
from ramify.protocol.ranking import best_first, number_in, vote_of, votes
from ramify.protocol.wire import Join, Prune


def joined(op: Join, branches: dict[str, ApiBranch]) -> str:
    """Make the text that a join appends, and drop its sources."""
    text = join_texts(op, [_known(branches, name).answer or "" for name in op.from_])
    for name in () if op.keep else op.from_:
        del branches[name]
    return text


def pruned(op: Prune, branches: dict[str, ApiBranch]) -> dict[str, Any]:
    """Move the winners, drop the others. Returns the `result` of the reply."""
    judges = [_known(branches, name) for name in op.score_from or op.from_]
    sources = [_known(branches, name) for name in op.from_]
    order, scores = _ranked(op, judges)
    winners = order[: op.winners]
    into = op.targets or [op.from_[i] for i in winners]
    moved = {name: sources[i].moved(name) for i, name in zip(winners, into, strict=True)}
    named: list[str] = [*op.from_, *(op.score_from or [])]
    going = [name for name in dict.fromkeys(named) if name not in moved]
    for name in () if op.keep else going:
        branches.pop(name, None)
    branches.update(moved)
    result: dict[str, Any] = {
        "kept": [
            {"from": op.from_[i], "into": name, "position": moved[name].position}
            for i, name in zip(winners, into, strict=True)
        ],
        "dropped": [] if op.keep else going,
    }
    return result if op.by == "first" else result | {"scores": dict(zip(op.from_, scores, strict=True))}


def _ranked(op: Prune, judges: Sequence[ApiBranch]) -> tuple[list[int], Sequence[float | None]]:
    texts = [judge.answer or "" for judge in judges]
    scores: Sequence[float | None]
    said: list[str] = []
    match op.by:
        case "logprob":
            raise Unsupported(
                "an OpenAI endpoint does not tell the log-probability of an answer: prune by 'number', "
                "'vote' or 'first'"
            )
        case "first":
            return sorted(range(len(judges)), key=lambda i: judges[i].ended), []
        case "number":
            scores = [number_in(text) for text in texts]
        case "vote":
            scores, said = votes(texts), [vote_of(text) for text in texts]
    if all(score is None for score in scores):
        raise BadRequest(f"no branch of `prune` by {op.by!r} has an answer that counts")
    return best_first(scores, said), scores


def _known(branches: dict[str, ApiBranch], name: str) -> ApiBranch:
    try:
        return branches[name]
    except KeyError:
        raise NoBranch(f"there is no branch {name!r}") from None
