"""Who a constraint is compiled for. What becomes of it: `e2e/test_constrained.py`."""

from types import SimpleNamespace
from typing import Any, cast

from ramify.actors.grammar.actor import GrammarActor
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec
from ramify.protocol.messages import Compile, Compiled, Constrain

SPEC = ConstraintSpec("regex", "a")


class Compiler:
    """Compiles anything, and keeps for whom."""

    def __init__(self) -> None:
        self.owners: list[str] = []

    async def compile(self, spec: ConstraintSpec, owner: str = "") -> CompiledConstraint:
        self.owners.append(owner)
        return CompiledConstraint(b"body", "automaton")


async def test_who_has_no_credential_takes_turns_as_a_session() -> None:
    compiler, told = Compiler(), list[Any]()
    scheduler = SimpleNamespace(tell=told.append)
    none = cast(Any, None)
    actor = GrammarActor(none, compiler, lambda: b"words", cast(Any, scheduler), none)
    for session, owner in ((1, ""), (2, ""), (3, "ann"), (4, "ann")):
        answer = await actor._compiled(Compile(session << 32 | 7, SPEC, owner))
        assert isinstance(answer, Compiled)
        assert answer.constraint == 1
    assert compiler.owners == ["session 1", "session 2", "ann", "ann"]
    assert told == [Constrain(0, b"words"), Constrain(1, b"body")]
