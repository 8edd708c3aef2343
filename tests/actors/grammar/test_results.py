"""What is kept, for how long, and how much of it."""

from ramify.actors.grammar.results import Results
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec
from ramify.protocol.errors import ConstraintError


def spec(text: str) -> ConstraintSpec:
    return ConstraintSpec("regex", text)


def test_results_and_failures_are_kept() -> None:
    results = Results(10_000)
    done, failed = CompiledConstraint(b"body", "automaton"), ConstraintError("no")
    results.put("ann", spec("a"), done)
    results.put("ann", spec("b"), failed)
    assert results.get("ann", spec("a"), 0.0) is done
    assert results.get("ann", spec("b"), 1e9) is failed
    assert results.get("ann", ConstraintSpec("lark", "a"), 0.0) is None
    assert results.get("ann", ConstraintSpec("regex", "a", spaced=True), 0.0) is None


def test_what_may_have_been_bad_luck_is_forgotten() -> None:
    results = Results(10_000)
    results.put("ann", spec("a"), ConstraintError("too slow"), until=5.0)
    assert results.get("ann", spec("a"), 4.9) is not None
    assert results.get("ann", spec("a"), 5.0) is None
    assert len(results) == results.bytes == 0


def test_the_least_recently_asked_for_goes() -> None:
    results = Results(3_000)
    for name in "abc":
        results.put("ann", spec(name), CompiledConstraint(b"x" * 300, "automaton"))
    assert len(results) == 3
    assert results.get("ann", spec("a"), 0.0) is not None
    results.put("ann", spec("d"), CompiledConstraint(b"x" * 300, "automaton", ("note",)))
    assert results.get("ann", spec("b"), 0.0) is None
    assert [results.get("ann", spec(name), 0.0) is not None for name in "acd"] == [True] * 3
    assert results.bytes <= 3_000
    results.put("ann", spec("d"), CompiledConstraint(b"x" * 5_000, "automaton"))
    assert len(results) == 1  # the newest stays, however large


def test_names_share_nothing_and_who_has_most_loses() -> None:
    results = Results(5_000)
    results.put("ann", spec("a"), CompiledConstraint(b"x" * 300, "automaton"))
    assert results.get("bob", spec("a"), 0.0) is None
    for i in range(50):
        results.put("bob", spec(f"{i}"), CompiledConstraint(b"x" * 300, "automaton"))
    assert results.get("ann", spec("a"), 0.0) is not None
    assert results.bytes <= 5_000
