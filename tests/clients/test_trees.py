"""Pages of a `tree` become one state, with the turns that forks share put back."""

from ramify.clients.trees import whole
from ramify.protocol.wire import BranchState, Place, SegmentState, StateReply


def turn(start: int, end: int, text: str = "") -> SegmentState:
    return SegmentState(kind="input", start=start, end=end, text=text)


def branch(
    name: str,
    *turns: SegmentState,
    parent: str | None = None,
    turns_from: int | None = None,
    shown: bool = True,
    position: int = 9,
) -> BranchState:
    return BranchState(
        branch=name,
        position=position,
        parent=parent,
        turns=list(turns) if shown else None,
        turns_from=turns_from,
    )


def page(*branches: BranchState, after: str | None = None, revision: int = 1) -> StateReply:
    there = None if after is None else Place(branch=after, position=4)
    return StateReply(session="s", op=1, revision=revision, branches=list(branches), next=there)


def turns_of(state: StateReply) -> dict[str, list[tuple[int, int]] | None]:
    return {
        each.branch: None if each.turns is None else [(t.start, t.end) for t in each.turns]
        for each in state.branches
    }


def test_one_page_is_the_tree() -> None:
    state = whole([page(branch("main", turn(0, 4), turn(4, 9)), branch("b", shown=False))])
    assert turns_of(state) == {"main": [(0, 4), (4, 9)], "b": None}
    assert state.next is None


def test_the_turns_of_a_branch_may_come_on_several_pages() -> None:
    """A page begins with the turn that the last one named; a turn that comes twice is one."""
    first = page(branch("main", turn(0, 2), turn(2, 4)), after="main", revision=3)
    second = page(branch("main", turn(2, 4), turn(4, 6), position=12), after="main", revision=3)
    third = page(branch("main", turn(6, 9), position=12), branch("b", turn(0, 1)), revision=3)
    state = whole([first, second, third])
    assert turns_of(state) == {"main": [(0, 2), (2, 4), (4, 6), (6, 9)], "b": [(0, 1)]}
    assert state.branches[0].position == 12
    assert (state.revision, state.next) == (3, None)


def test_a_branch_without_turns_on_its_first_page_gets_those_of_the_next() -> None:
    state = whole([page(branch("main"), after="main"), page(branch("main", turn(0, 4)))])
    assert turns_of(state) == {"main": [(0, 4)]}
    state = whole([page(branch("main", turn(0, 4)), after="main"), page(branch("main", shown=False))])
    assert turns_of(state) == {"main": [(0, 4)]}


def test_what_forks_share_comes_from_the_parent() -> None:
    """A grandchild's parent takes its own from `main`; what lies behind the fork is not shared."""
    state = whole(
        [
            page(
                branch("leaf", turn(6, 8), parent="child", turns_from=6),
                branch("child", turn(4, 6), turn(6, 7), parent="main", turns_from=4),
                branch("main", turn(0, 2), turn(2, 4), turn(4, 9)),
                branch("other", turn(4, 5), parent="main", turns_from=4),
                branch("whole", turn(0, 3), parent="main"),
            )
        ]
    )
    assert turns_of(state) == {
        "leaf": [(0, 2), (2, 4), (4, 6), (6, 8)],
        "child": [(0, 2), (2, 4), (4, 6), (6, 7)],
        "main": [(0, 2), (2, 4), (4, 9)],
        "other": [(0, 2), (2, 4), (4, 5)],
        "whole": [(0, 3)],
    }
    assert all(each.turns_from is None for each in state.branches)


def test_a_parent_that_is_not_shown_has_nothing_to_give() -> None:
    """One branch was asked for, or its parent has been dropped."""
    lone = branch("child", turn(4, 6), parent="gone", turns_from=4)
    assert turns_of(whole([page(lone)])) == {"child": [(4, 6)]}
    silent = branch("main", shown=False)
    child = branch("child", turn(4, 6), parent="main", turns_from=4)
    assert turns_of(whole([page(silent, child)])) == {"main": None, "child": [(4, 6)]}
    root = branch("root", turn(4, 6), turns_from=4)
    assert turns_of(whole([page(root)])) == {"root": [(4, 6)]}


def test_a_long_chain_of_forks_is_no_recursion() -> None:
    chain = [branch("b0", turn(0, 1))]
    for i in range(1, 5000):
        chain.append(branch(f"b{i}", turn(1, 2), parent=f"b{i - 1}", turns_from=1))
    state = whole([page(*reversed(chain))])
    assert all(each[0] == (0, 1) for each in turns_of(state).values() if each)
