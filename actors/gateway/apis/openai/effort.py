"""How much a model is to think, as clients of the doors say it: by an effort, or not at all.

A template that tells the model an effort gets it. For any other model that thinks, an effort is the
most tokens of a thought, and "none" an empty one. A model that does not think has nothing to bound.
"""

from typing import Any, Literal, NamedTuple

from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import Effort

Asked = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Tokens of a thought, and the part of the answer's tokens that they are at most.
BUDGETS: dict[Asked, tuple[int, float]] = {
    "low": (1024, 1 / 4),
    "medium": (4096, 1 / 2),
    "high": (16384, 3 / 4),
    "xhigh": (32768, 7 / 8),
}
_TOLD: dict[Asked, Effort] = {"minimal": "low", "low": "low", "medium": "medium"}  # others: "high"


class ThinkingEffort(NamedTuple):
    """How much to think. `effort`: of `open`; `tokens`: `generate.thought_tokens`."""

    effort: Effort | None = None
    tokens: int | None = None


def thinking(asked: Asked | None, most: int | None, served: Served, field: str) -> ThinkingEffort:
    """Turn an effort into settings. `most`: tokens of the answer, if given; `field`: the request's.

    Raises InvalidField.
    """
    if asked is None:
        return ThinkingEffort()
    if asked == "none" and served.unthought is None:
        raise InvalidField(
            f'`{field}`: this model cannot be kept from thinking: ask for "low", or leave it out'
        )
    if served.tells_effort and asked != "none":
        return ThinkingEffort(effort=_TOLD.get(asked, "high"))
    if not served.thinks:
        return ThinkingEffort()
    if asked in ("none", "minimal"):
        return ThinkingEffort(tokens=0 if served.unthought is not None else BUDGETS["low"][0])
    if asked not in BUDGETS:
        return ThinkingEffort()
    tokens, part = BUDGETS[asked]
    return ThinkingEffort(tokens=tokens if most is None else max(1, min(tokens, int(most * part))))


def described(served: Served) -> dict[str, Any]:
    """Describe the efforts that clients of our protocol can ask for.

    They ask by `open.effort` (`told`), else by `generate.thought_tokens`: each effort has a bound in
    tokens of a thought, and a bound as a part of the answer's tokens.
    """
    if not served.tells_effort and (not served.thinks or served.unthought == ""):
        return {"told": False, "efforts": {}}
    named: tuple[Asked, ...] = ("low", "medium", "high")
    none = {} if served.unthought is None else {"none": {"tokens": 0, "part": 0.0}}
    budgets = {name: dict(zip(("tokens", "part"), BUDGETS[name], strict=True)) for name in named}
    return {"told": served.tells_effort, "efforts": none | budgets}


def switched(thinks: bool | None, served: Served, field: str) -> Asked | None:
    """Turn a yes or no into an effort. Raises InvalidField."""
    if thinks and (not served.thinks or served.unthought == ""):
        raise InvalidField(f"`{field}`: this model does not think: leave it out")
    return "none" if thinks is False else None
