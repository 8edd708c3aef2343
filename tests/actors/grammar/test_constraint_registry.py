"""Numbers of compiled constraints: each once, the least recently named are given up."""

from ramify.actors.grammar.constraint_registry import NOBODY, ConstraintRegistry
from ramify.actors.grammar.job_queue import Owner
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec

ANN, BOB = Owner("ann", 1), Owner("bob", 2)


def spec(text: str) -> ConstraintSpec:
    return ConstraintSpec("regex", text)


def body(size: int) -> CompiledConstraint:
    return CompiledConstraint(b"x" * size, "automaton")


def put(
    registry: ConstraintRegistry, text: str, compiled: CompiledConstraint, owner: Owner = NOBODY
) -> tuple[int, list[int]]:
    entry, retired = registry.put(spec(text), compiled, owner)
    return entry.number, retired


def number(registry: ConstraintRegistry, text: str, owner: Owner = NOBODY) -> int | None:
    found = registry.find(spec(text), owner)
    return None if found is None else found.number


def test_each_is_numbered_once() -> None:
    registry = ConstraintRegistry()
    assert registry.find(spec("a")) is None
    assert put(registry, "a", body(1)) == (1, [])
    assert put(registry, "b", body(1)) == (2, [])
    assert (number(registry, "a"), number(registry, "b"), len(registry)) == (1, 2, 2)
    assert (registry.hits, registry.retired, registry.bytes) == (2, 0, 2)
    assert registry.peek(spec("a")) is not None
    assert registry.hits == 2


def test_the_least_recently_named_gives_way() -> None:
    registry = ConstraintRegistry(most=2)
    for text in "ab":
        registry.put(spec(text), body(1))
    registry.find(spec("a"))
    assert put(registry, "c", body(1)) == (3, [2])
    assert registry.find(spec("b")) is None
    assert put(registry, "b", body(1)) == (4, [1])  # never a number twice


def test_bytes_are_bounded_and_the_newest_stays() -> None:
    registry = ConstraintRegistry(most_bytes=10)
    registry.put(spec("a"), body(6))
    assert put(registry, "b", body(6)) == (2, [1])
    assert put(registry, "c", body(100)) == (3, [2])
    assert number(registry, "c") == 3
    assert (registry.retired, registry.bytes) == (2, 100)


def test_what_the_executor_holds_counts_though_its_body_is_small() -> None:
    registry = ConstraintRegistry(most_bytes=10)
    registry.put(spec("a"), CompiledConstraint(b"x", "automaton", (), 6))
    assert put(registry, "b", CompiledConstraint(b"x", "automaton", (), 6)) == (2, [1])


def test_who_has_most_gives_way_first() -> None:
    """One client asks for more and more; what others have stays."""
    registry = ConstraintRegistry(most_bytes=100)
    for text in "abc":
        put(registry, text, body(10), ANN)
    for i in range(50):
        put(registry, f"x{i}", body(10), BOB)
    assert [number(registry, text, ANN) for text in "abc"] == [1, 2, 3]
    assert (len(registry), registry.bytes) == (10, 100)
    registry = ConstraintRegistry(most=10)
    put(registry, "a", body(1), ANN)
    for i in range(50):
        put(registry, f"x{i}", body(1), BOB)
    assert number(registry, "a", ANN) == 1


def test_what_another_session_asks_for_counts_for_that_one() -> None:
    registry = ConstraintRegistry(most=4)
    other = Owner("ann", 3)
    for text in "abc":
        put(registry, text, body(1), ANN)
    assert number(registry, "a", other) == 1
    put(registry, "d", body(1), other)
    assert put(registry, "e", body(1), other) == (5, [1])  # it has three, "a" among them
    assert [number(registry, text, ANN) for text in "bc"] == [2, 3]


def test_names_share_no_constraint() -> None:
    """Else the time until a first token tells a name what another one uses."""
    registry = ConstraintRegistry()
    put(registry, "a", body(1), ANN)
    assert number(registry, "a", BOB) is None
    assert put(registry, "a", body(1), BOB) == (2, [])
    assert [number(registry, "a", owner) for owner in (ANN, BOB)] == [1, 2]


def test_sessions_without_a_name_have_one_share() -> None:
    """However many they are; and among them, the one that has most gives way."""
    registry = ConstraintRegistry(most=20)
    for i in range(8):
        put(registry, f"a{i}", body(1), ANN)
    put(registry, "u", body(1), Owner("", 7))
    for i in range(100):
        put(registry, f"x{i}", body(1), Owner("", 100 + i // 30))
    assert [number(registry, f"a{i}", ANN) for i in range(8)] == list(range(1, 9))
    assert number(registry, "u", Owner("", 7)) == 9
