"""Which sessions make room for newer ones."""

from ramify.actors.kit.memory import ALMOST, AT_ONCE, LOOKED_AT, Budget, Displacement


def nobody(_: str) -> bool:
    return False


def room(displacement: Displacement, budget: Budget, in_use=nobody) -> list[str]:  # type: ignore[no-untyped-def]
    return list(displacement.make_room("me", budget, in_use))


def test_the_longest_unused_goes_at_half_of_the_sessions() -> None:
    displacement, budget = Displacement(), Budget("", "", 1 << 20, 8)
    for name in "abcd":
        assert room(displacement, budget) == []
        displacement.use("me", name)
    displacement.use("me", "a")
    displacement.use("you", "x")  # another owner's do not count
    assert room(displacement, budget) == ["b"]
    displacement.use("me", "e")
    assert room(displacement, budget, lambda name: name in "cd") == ["a"]
    assert displacement.count("me") == 3


def test_those_in_use_stay_even_if_all_are() -> None:
    displacement, budget = Displacement(), Budget("", "", 1 << 20, 2)
    for i in range(2 * LOOKED_AT):
        displacement.use("me", str(i))
    assert room(displacement, budget, lambda name: int(name) < LOOKED_AT) == []
    assert len(room(displacement, budget)) == AT_ONCE


def test_one_goes_where_bytes_are_short() -> None:
    displacement, budget = Displacement(), Budget("", "", 1000, 100)
    displacement.use("me", "a")
    displacement.use("me", "b")
    budget.held = int(1000 * ALMOST)
    assert room(displacement, budget) == []
    budget.held += 1
    assert room(displacement, budget) == ["a"]


def test_what_has_ended_is_forgotten() -> None:
    displacement = Displacement()
    displacement.use("me", "a")
    displacement.drop("me", "a")
    displacement.drop("me", "a")
    assert displacement.count("me") == 0
    assert displacement._by_owner == {}
