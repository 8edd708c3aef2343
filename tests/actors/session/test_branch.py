"""Branches: what is remembered of moves backwards."""

import random

from ramify.actors.session.branch import CUTS_KEPT, Branch, input_segment
from ramify.actors.session.segments import Tail


def test_undercut_is_the_lowest_move_back_since_a_revision() -> None:
    rng = random.Random(1)
    branch, cuts = Branch("a", 1, born=1), []
    for revision in range(2, 40):
        to = rng.randrange(1000)
        branch.cut_back(revision, to)
        cuts.append((revision, to))
    for known in range(1, 41):
        expected = min((to for at, to in cuts if at > known), default=None)
        assert branch.undercut(known) == expected
    assert branch.undercut(None) == min(to for _, to in cuts)


def test_moves_back_take_bounded_memory_and_old_ones_only_replay_more() -> None:
    branch = Branch("a", 1)
    for revision in range(1, 10_000):
        branch.cut_back(revision, 10 * revision)
    assert len(branch.cuts) == CUTS_KEPT
    for known in range(0, 9_999, 7):
        undercut = branch.undercut(known)
        assert undercut is not None
        assert undercut <= 10 * (known + 1)
    assert branch.undercut(9_998) == 99_990


def test_a_branch_born_after_the_revision_is_another_one() -> None:
    branch = Branch("a", 1, born=5)
    assert branch.undercut(4) == 0
    assert branch.undercut(5) is None
    assert branch.undercut(None) is None


def with_input(name: str, *texts: str) -> Branch:
    branch = Branch(name, 1)
    for text in texts:
        input_segment(branch, [ord(c) for c in text], text, tail=Tail.RAW)
    return branch


def test_who_becomes_a_branch_of_another_root_shares_nothing() -> None:
    one, other = with_input("a", "abc"), with_input("b", "xyz", "u")
    assert one.become(other) == 0
    assert (one.text(), one.position, one.own) == ("xyzu", 4, 0)


def test_a_client_that_missed_the_last_moves_back_replays_no_more_than_it_must() -> None:
    branch = Branch("a", 1)
    for revision in range(1, CUTS_KEPT + 2):  # one more than are kept
        branch.cut_back(revision, 10 * revision)
    assert [branch.undercut(known) for known in (0, 1, 2, 3)] == [10, 10, 30, 40]
