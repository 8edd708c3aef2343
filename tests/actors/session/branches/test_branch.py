"""Branches: what is remembered of moves backwards."""

import random
from array import array

from ramify.actors.session.branches.branch import CUTS_KEPT, Label, SessionBranch, input_segment
from ramify.actors.session.branches.segments import OutputSegment, Tail


def test_undercut_is_the_lowest_move_back_since_a_revision() -> None:
    rng = random.Random(1)
    branch, cuts = SessionBranch("a", 1, born=1), []
    for revision in range(2, 40):
        to = rng.randrange(1000)
        branch.cut_back(revision, to)
        cuts.append((revision, to))
    for known in range(1, 41):
        expected = min((to for at, to in cuts if at > known), default=None)
        assert branch.undercut(known) == expected
    assert branch.undercut(None) == min(to for _, to in cuts)


def test_moves_back_take_bounded_memory_and_old_ones_only_replay_more() -> None:
    branch = SessionBranch("a", 1)
    for revision in range(1, 10_000):
        branch.cut_back(revision, 10 * revision)
    assert len(branch.cuts) == CUTS_KEPT
    for known in range(0, 9_999, 7):
        undercut = branch.undercut(known)
        assert undercut is not None
        assert undercut <= 10 * (known + 1)
    assert branch.undercut(9_998) == 99_990


def test_a_branch_born_after_the_revision_is_another_one() -> None:
    branch = SessionBranch("a", 1, born=5)
    assert branch.undercut(4) == 0
    assert branch.undercut(5) is None
    assert branch.undercut(None) is None


def with_input(name: str, *texts: str) -> SessionBranch:
    branch = SessionBranch(name, 1)
    for text in texts:
        input_segment(branch, [ord(c) for c in text], text, tail=Tail.RAW)
    return branch


def test_who_becomes_a_branch_of_another_root_shares_nothing() -> None:
    one, other = with_input("a", "abc"), with_input("b", "xyz", "u")
    assert one.become(other) == 0
    assert (one.text(), one.position, one.own) == ("xyzu", 4, 0)


def test_a_client_that_missed_the_last_moves_back_replays_no_more_than_it_must() -> None:
    branch = SessionBranch("a", 1)
    for revision in range(1, CUTS_KEPT + 2):  # one more than are kept
        branch.cut_back(revision, 10 * revision)
    assert [branch.undercut(known) for known in (0, 1, 2, 3)] == [10, 10, 30, 40]


def words(tokens: object) -> str:
    return "".join(map(chr, tokens))  # type: ignore[call-overload]


def with_output(name: str, text: str, output: str) -> SessionBranch:
    branch = with_input(name, text)
    segment = OutputSegment(branch.position, op=1, client="c")
    segment.tokens.extend(map(ord, output))
    branch.segments.append(segment)
    return branch


def test_an_empty_branch_has_no_end() -> None:
    branch = SessionBranch("a", 1)
    assert (branch.position, branch.released, branch.tail, branch.role) == (0, 0, Tail.RAW, None)
    assert (branch.at, branch.own, branch.born, branch.parent, branch.prefill) == (0, 0, 0, None, None)
    assert (branch.retain_s, branch.meta, branch.reason, branch.cuts) == (None, None, None, [])


def test_what_a_generation_holds_back_is_not_released() -> None:
    branch = with_output("a", "abc", "xyz")
    segment = branch.segments[-1]
    assert isinstance(segment, OutputSegment)
    assert (branch.position, branch.released) == (6, 3)
    segment.release(2, "xy")
    assert branch.released == 5
    segment.ended = True
    assert branch.released == 6
    assert with_input("b", "abc").released == 3


def test_a_fork_shares_what_is_whole_and_a_twin_all() -> None:
    branch = with_output("a", "abc", "xyz")
    child = branch.fork("b", 2, 5, words, born=4)
    assert (child.parent, child.at, child.own, child.born, child.text()) == ("a", 5, 5, 4, "abcxy")
    assert child.segments[0] is branch.segments[0]
    child.reason, child.own = "stop", 3
    twin = child.twin("c", 3)
    assert (twin.parent, twin.at, twin.own, twin.born, twin.reason) == ("a", 5, 3, 4, "stop")
    assert list(twin.segments) == list(child.segments)
    assert twin.segments is not child.segments


def test_a_branch_becomes_another_from_where_they_part() -> None:
    one = with_input("a", "abc", "de")
    other = one.fork("b", 2, 5, words)
    other.truncate(4, words)
    input_segment(other, [120], "x", tail=Tail.RAW)
    other.reason = "length"
    one.own = 4
    assert one.become(other) == 3
    assert (one.text(), one.handle, one.reason, one.own) == ("abcdx", 2, "length", 3)
    input_segment(one, [121], "y", tail=Tail.RAW)
    assert (one.text(), other.text()) == ("abcdxy", "abcdx")
    assert other.become(other.twin("t", 9)) == 5


def test_the_answer_is_the_last_one_since_the_fork() -> None:
    branch = with_output("a", "abc", "xyz")
    answer = branch.segments[-1]
    assert branch.answer() is answer
    input_segment(branch, [113], "q", tail=Tail.RAW)
    assert branch.answer() is answer
    child = branch.fork("b", 2, 7, words)
    assert child.answer() is None
    child.own = 3
    assert child.answer() is answer
    child.own = 4
    assert child.answer() is None
    branch.truncate(2, words)
    assert (branch.own, branch.answer()) == (0, None)
    child.truncate(2, words)
    assert child.own == 2


def test_turns_are_counted_back_to_where_one_begins() -> None:
    branch = SessionBranch("a", 1)
    for turn in (1, 0, 1, -2, 1):
        input_segment(branch, [65, 66], "AB", tail=Tail.CLOSED, turn=turn)
    # from the end: one begins at 8, two somewhere in 6 to 8, one at 4, one at 0
    assert [branch.turn_start(turns) for turns in (1, 2, 3, 4, 5, 6)] == [8, None, None, 4, 0, None]
    assert SessionBranch("b", 1).turn_start(1) is None
    joined = SessionBranch("c", 1)
    input_segment(joined, [65], "A", tail=Tail.CLOSED, turn=2)
    assert [joined.turn_start(turns) for turns in (1, 2)] == [None, 0]


def test_moves_back_over_others_are_one_move() -> None:
    branch = SessionBranch("a", 1)
    for revision, to in [(1, 10), (2, 20), (3, 20), (4, 15)]:
        branch.cut_back(revision, to)
    assert branch.cuts == [(1, 10), (4, 15)]
    assert [branch.undercut(known) for known in (None, 0, 1, 3, 4)] == [10, 10, 15, 15, None]


def test_outputs_from_a_position_end_there_or_later() -> None:
    branch = with_output("a", "abc", "xyz")
    first = branch.segments[-1]
    input_segment(branch, [113, 114], "qr", tail=Tail.RAW)
    second = OutputSegment(8)
    second.tokens.extend([1, 2])
    branch.segments.append(second)
    found = {at: list(branch.outputs_from(at)) for at in (0, 5, 6, 7, 8, 9, 10, 11)}
    assert found == {
        0: [first, second],
        5: [first, second],
        6: [first, second],
        7: [second],
        8: [second],
        9: [second],
        10: [second],
        11: [],
    }
    assert list(with_input("b", "abc").outputs_from(1)) == []


def test_segments_in_common_with_the_parent() -> None:
    branch = with_input("a", "ab", "cd", "ef", "gh")
    counts = [branch.fork("c", 2, at, words).shared_with(branch) for at in range(9)]
    assert counts == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    later = branch.twin("a", 7)
    assert branch.fork("d", 6, 8, words).shared_with(later) == 0
    assert branch.fork("d", 7, 8, words).shared_with(later) == 4
    assert [branch.index_at(at) for at in (0, 1, 2, 3, 6, 7)] == [0, 1, 1, 2, 3, 4]


def test_dropped_ancestors_are_skipped_for_good() -> None:
    root = Label("root")
    middle = Label("middle", root)
    leaf = Label("leaf", middle)
    assert (leaf.ancestor(), root.ancestor(), leaf.gone) == (middle, None, False)
    middle.gone = True
    assert leaf.ancestor() is root
    assert leaf.above is root
    middle.above, root.gone = root, True
    below = Label("below", middle)
    assert (middle.above, below.ancestor()) == (None, None)


def test_input_keeps_the_array_that_branches_share() -> None:
    branch, run = SessionBranch("a", 1), array("i", [1, 2])
    assert input_segment(branch, run, "x", tail=Tail.RAW).tokens is run
    assert input_segment(branch, [3], "y", tail=Tail.RAW).start == 2
    assert list(branch.tokens()) == [1, 2, 3]
