"""Which sessions go: against the plain rule, one session after the other."""

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.store.retention import surplus
from tests.amount import examples

SESSIONS = st.dictionaries(
    st.sampled_from(["", "ann", "bob", "eve"]),
    st.tuples(st.integers(0, 50), st.lists(st.integers(1, 30), max_size=6)),  # stays; may go, by age
)


def plain(owners: dict[str, tuple[int, list[int]]], over: int, most: int) -> list[tuple[str, int]]:
    left = {name: list(enumerate(sizes)) for name, (_, sizes) in owners.items()}
    gone: list[tuple[str, int]] = []
    while over > 0 and len(gone) < most and any(left.values()):
        held = {
            name: owners[name][0] + sum(size for _, size in rest) for name, rest in left.items() if rest
        }
        name = min(held, key=lambda each: (-held[each], each))
        place, size = left[name].pop(0)
        gone.append((name, place))
        over -= size
    return gone


@settings(derandomize=True, deadline=None, max_examples=examples(100, 300))
@given(SESSIONS, st.integers(-10, 200), st.integers(0, 30))
def test_the_owner_that_holds_most_loses_its_oldest(
    owners: dict[str, tuple[int, list[int]]], over: int, most: int
) -> None:
    def oldest(owner: str) -> Iterator[tuple[tuple[str, int], int]]:
        return (((owner, place), size) for place, size in enumerate(owners[owner][1]))

    held = {name: stays + sum(sizes) for name, (stays, sizes) in owners.items()}
    assert surplus(held, oldest, over, most) == plain(owners, over, most)


def test_the_sessions_of_who_loses_none_are_not_read() -> None:
    asked: list[str] = []

    def oldest(owner: str) -> Iterator[tuple[int, int]]:
        asked.append(owner)
        return iter([(1, 40), (2, 40)])

    assert surplus({"ann": 80, "bob": 10}, oldest, 30, 10) == [1]
    assert asked == ["ann"]
