"""Numbers of compiled constraints: each once, the least recently named are given up."""

from ramify.actors.grammar.shelf import Shelf
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec


def spec(text: str) -> ConstraintSpec:
    return ConstraintSpec("regex", text)


def body(size: int) -> CompiledConstraint:
    return CompiledConstraint(b"x" * size, "automaton")


def test_each_is_numbered_once() -> None:
    shelf = Shelf()
    assert shelf.find(spec("a")) is None
    assert shelf.put(spec("a"), body(1)) == (1, [])
    assert shelf.put(spec("b"), body(1)) == (2, [])
    assert (shelf.find(spec("a")), shelf.find(spec("b")), len(shelf)) == (1, 2, 2)


def test_the_least_recently_named_gives_way() -> None:
    shelf = Shelf(most=2)
    for text in "ab":
        shelf.put(spec(text), body(1))
    shelf.find(spec("a"))
    assert shelf.put(spec("c"), body(1)) == (3, [2])
    assert shelf.find(spec("b")) is None
    assert shelf.put(spec("b"), body(1)) == (4, [1])  # never a number twice


def test_bytes_are_bounded_and_the_newest_stays() -> None:
    shelf = Shelf(most_bytes=10)
    shelf.put(spec("a"), body(6))
    assert shelf.put(spec("b"), body(6)) == (2, [1])
    assert shelf.put(spec("c"), body(100)) == (3, [2])
    assert shelf.find(spec("c")) == 3


def test_what_the_executor_holds_counts_though_its_body_is_small() -> None:
    shelf = Shelf(most_bytes=10)
    shelf.put(spec("a"), CompiledConstraint(b"x", "automaton", (), 6))
    assert shelf.put(spec("b"), CompiledConstraint(b"x", "automaton", (), 6)) == (2, [1])
