"""Random sessions whose generations have constraints: forks, roll backs, cancels, pauses, too few pages.

Whatever happens in the midst of an output: each op ends once, and an output that ended by itself obeys,
by Python's `re` and by `jsonschema`, with and without guessed tokens.
"""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from ramify.protocol import wire as w
from ramify.protocol.wire import Constraint

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "age": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    },
    "required": ["kind", "tags", "age"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "(" start ")" | /[a-z]{1,3}/'
CONSTRAINTS = [
    Constraint(regex=r"[0-9]{3}-[0-9]{4}"),
    Constraint(regex=r"(no|none)"),
    Constraint(regex=r"(a|bc){0,20}d"),
    Constraint(choices=["yes", "no", "yes and no"]),
    Constraint(json_schema=SCHEMA),
    Constraint(json_schema={"enum": [1, 12, "x"]}),
    Constraint(grammar=GRAMMAR),
]


def obeys(constraint: Constraint, text: str) -> bool:
    if constraint.regex is not None:
        return re.fullmatch(constraint.regex, text, re.A) is not None
    if constraint.choices is not None:
        return text in constraint.choices
    if constraint.grammar is not None:
        inner = text.strip("()")
        depth = (len(text) - len(inner)) // 2
        return (
            text == "(" * depth + inner + ")" * depth and re.fullmatch("[a-z]{1,3}", inner) is not None
        )
    assert constraint.json_schema is not None
    try:
        jsonschema.validate(json.loads(text), constraint.json_schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


class Program:
    """One client's random ops, and what became of its generations."""

    def __init__(self, engine: Any, name: str, rng: random.Random) -> None:
        self.client = engine.session(name, detach="pause")
        self.rng = rng
        self.ids = iter(range(2, 10_000))
        self.branches = ["main"]
        self.asked: dict[int, Constraint] = {}
        self.away = False
        self.client.send(w.Append(id=1, text="hello"))

    def act(self) -> None:
        rng, ident, branch = self.rng, next(self.ids), self.rng.choice(self.branches)
        kind = rng.choice(["generate", "generate", "generate", "fork", "rollback", "cancel", "leave"])
        if self.away and kind != "leave":
            return
        if kind == "generate":
            self.asked[ident] = constraint = rng.choice(CONSTRAINTS)
            names = [f"b{ident}", f"c{ident}"] if rng.random() < 0.2 else []
            many: dict[str, Any] = {"n": 2, "as_": names} if names else {}
            self.branches += names
            self.client.send(
                w.Generate(
                    id=ident,
                    branch=branch,
                    constraint=constraint,
                    quiet=True,
                    seed=ident,
                    max_tokens=rng.choice([5, 90, 90]),
                    temperature=rng.choice([0.0, 1.0]),
                    **many,
                )
            )
        elif kind == "fork":
            self.branches.append(f"f{ident}")
            self.client.send(w.Fork(id=ident, branch=branch, as_=[f"f{ident}"]))
        elif kind == "rollback":
            self.client.send(w.Rollback(id=ident, branch=branch, to=1))
        elif kind == "cancel":
            self.client.send(w.Cancel(id=ident, branch=branch))
        else:
            self.away = not self.away
            if self.away:
                self.client.drop()
            else:
                self.client.connect()

    def check(self) -> int:
        """How many outputs ended by themselves; they all obey."""
        stopped = 0
        for ident, constraint in self.asked.items():
            dones = [end for end in self.client.replies[ident] if isinstance(end, w.Done)]
            assert len({done.branch for done in dones}) == len(dones)
            for done in dones:
                if done.reason == "stop":
                    assert obeys(constraint, done.text or ""), (constraint, done.text)
                    stopped += 1
                else:
                    assert done.reason in ("cancelled", "length"), done
        return stopped


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_sessions(sim: Callable[..., Any], seed: int, drafts: int) -> None:
    rng = random.Random(seed)
    engine = sim(
        seed=seed,
        pages=rng.choice([160, 4000]),
        context=120,
        drafts=drafts,
        max_rows=rng.choice([3, 16]),
        constraints=rng.choice([2, 512]),
    )
    programs = [Program(engine, f"c{i}", rng) for i in range(3)]
    for _ in range(40):
        rng.choice(programs).act()
        engine.pump(rng.randrange(12))
    for program in programs:
        if program.away:
            program.client.connect()
    engine.pump()
    assert sum(program.check() for program in programs) > 3
    assert not engine.executor.constraints._of
    assert engine.executor.corruptions == 0
