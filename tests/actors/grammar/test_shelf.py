"""Numbers of compiled constraints: each once, the least recently named are given up."""

from ramify.actors.grammar.owners import Owner
from ramify.actors.grammar.shelf import NOBODY, Shelf
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec

ANN, BOB = Owner("ann", 1), Owner("bob", 2)


def spec(text: str) -> ConstraintSpec:
    return ConstraintSpec("regex", text)


def body(size: int) -> CompiledConstraint:
    return CompiledConstraint(b"x" * size, "automaton")


def put(
    shelf: Shelf, text: str, compiled: CompiledConstraint, owner: Owner = NOBODY
) -> tuple[int, list[int]]:
    entry, retired = shelf.put(spec(text), compiled, owner)
    return entry.number, retired


def number(shelf: Shelf, text: str, owner: Owner = NOBODY) -> int | None:
    found = shelf.find(spec(text), owner)
    return None if found is None else found.number


def test_each_is_numbered_once() -> None:
    shelf = Shelf()
    assert shelf.find(spec("a")) is None
    assert put(shelf, "a", body(1)) == (1, [])
    assert put(shelf, "b", body(1)) == (2, [])
    assert (number(shelf, "a"), number(shelf, "b"), len(shelf)) == (1, 2, 2)
    assert (shelf.hits, shelf.retired, shelf.bytes) == (2, 0, 2)
    assert shelf.peek(spec("a")) is not None
    assert shelf.hits == 2


def test_the_least_recently_named_gives_way() -> None:
    shelf = Shelf(most=2)
    for text in "ab":
        shelf.put(spec(text), body(1))
    shelf.find(spec("a"))
    assert put(shelf, "c", body(1)) == (3, [2])
    assert shelf.find(spec("b")) is None
    assert put(shelf, "b", body(1)) == (4, [1])  # never a number twice


def test_bytes_are_bounded_and_the_newest_stays() -> None:
    shelf = Shelf(most_bytes=10)
    shelf.put(spec("a"), body(6))
    assert put(shelf, "b", body(6)) == (2, [1])
    assert put(shelf, "c", body(100)) == (3, [2])
    assert number(shelf, "c") == 3
    assert (shelf.retired, shelf.bytes) == (2, 100)


def test_what_the_executor_holds_counts_though_its_body_is_small() -> None:
    shelf = Shelf(most_bytes=10)
    shelf.put(spec("a"), CompiledConstraint(b"x", "automaton", (), 6))
    assert put(shelf, "b", CompiledConstraint(b"x", "automaton", (), 6)) == (2, [1])


def test_who_has_most_gives_way_first() -> None:
    """One client asks for more and more; what others have stays."""
    shelf = Shelf(most_bytes=100)
    for text in "abc":
        put(shelf, text, body(10), ANN)
    for i in range(50):
        put(shelf, f"x{i}", body(10), BOB)
    assert [number(shelf, text, ANN) for text in "abc"] == [1, 2, 3]
    assert (len(shelf), shelf.bytes) == (10, 100)
    shelf = Shelf(most=10)
    put(shelf, "a", body(1), ANN)
    for i in range(50):
        put(shelf, f"x{i}", body(1), BOB)
    assert number(shelf, "a", ANN) == 1


def test_what_another_session_asks_for_counts_for_that_one() -> None:
    shelf = Shelf(most=4)
    other = Owner("ann", 3)
    for text in "abc":
        put(shelf, text, body(1), ANN)
    assert number(shelf, "a", other) == 1
    put(shelf, "d", body(1), other)
    assert put(shelf, "e", body(1), other) == (5, [1])  # it has three, "a" among them
    assert [number(shelf, text, ANN) for text in "bc"] == [2, 3]


def test_names_share_no_constraint() -> None:
    """Else the time until a first token tells a name what another one uses."""
    shelf = Shelf()
    put(shelf, "a", body(1), ANN)
    assert number(shelf, "a", BOB) is None
    assert put(shelf, "a", body(1), BOB) == (2, [])
    assert [number(shelf, "a", owner) for owner in (ANN, BOB)] == [1, 2]


def test_sessions_without_a_name_have_one_share() -> None:
    """However many they are; and among them, the one that has most gives way."""
    shelf = Shelf(most=20)
    for i in range(8):
        put(shelf, f"a{i}", body(1), ANN)
    put(shelf, "u", body(1), Owner("", 7))
    for i in range(100):
        put(shelf, f"x{i}", body(1), Owner("", 100 + i // 30))
    assert [number(shelf, f"a{i}", ANN) for i in range(8)] == list(range(1, 9))
    assert number(shelf, "u", Owner("", 7)) == 9
