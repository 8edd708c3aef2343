"""What `state` tells of a branch."""

from array import array

import pytest

from ramify.actors.session.branches.branch import Label, SessionBranch
from ramify.actors.session.branches.segments import InputSegment, OutputSegment, Tail
from ramify.actors.session.sockets.view import _Page, branch_state, segment_state
from ramify.protocol.wire import ChatMessage, Place, Tree


@pytest.mark.parametrize(
    ("resident", "kv", "shown"), [(-1, "none", None), (0, "none", 0), (1, "gpu", 1), (5, "gpu", 5)]
)
def test_a_state_tells_what_is_known_of_the_kv(resident: int, kv: str, shown: int | None) -> None:
    state = branch_state(SessionBranch("a", 1), resident)
    assert (state.kv, state.resident) == (kv, shown)
    assert (state.parent, state.at, state.running, state.started_at) == (None, None, None, None)


def test_a_state_tells_where_a_generation_began() -> None:
    segment = OutputSegment(0, op=7)
    segment.tokens = array("i", [1, 2])
    branch = SessionBranch("a", 1)
    branch.segments.append(segment)
    state = branch_state(branch, -1)
    assert (state.running, state.started_at) == (7, 0)


def test_a_root_answers_with_what_it_generated_first() -> None:
    branch, segment = SessionBranch("a", 1), OutputSegment(0, op=7)
    assert branch.answer() is None
    segment.tokens = array("i", [1])
    branch.segments.append(segment)
    assert branch.answer() is segment


def letters(text: str) -> "array[int]":
    return array("i", map(ord, text))


def turns(*texts: str) -> SessionBranch:
    branch = SessionBranch("a", 1)
    for text in texts:
        branch.segments.append(
            InputSegment(branch.position, letters(text), text, tail=Tail.CLOSED, role="user", op=4)
        )
    return branch


def test_a_turn_weighs_its_text_and_its_tokens() -> None:
    """100 bytes on the wire beside them, and 8 for a token."""
    for text, tokens, size in (
        (True, True, 200 + 5 + 40),
        (True, False, 200 + 5),
        (False, True, 200 + 40),
    ):
        page = _Page(10_000)
        shown = page.take(turns("ab", "cde"), 0, Tree(id=1, text=text, tokens=tokens))
        assert (len(shown), page.size, page.next, page.full) == (2, size, None, False)


@pytest.mark.parametrize(("most", "count"), [(1, 1), (101, 1), (203, 1), (204, 2), (305, 2), (306, 3)])
def test_a_page_holds_what_fits_and_one_turn_at_least(most: int, count: int) -> None:
    page = _Page(most)
    shown = page.take(turns("ab", "cd", "ef"), 0, Tree(id=1, text=True))
    assert len(shown) == count
    assert page.next == (None if count == 3 else Place(branch="a", position=2 * count))


def test_a_page_that_has_a_turn_may_take_none_of_the_next_branch() -> None:
    page = _Page(150)
    assert len(page.take(turns("ab"), 0, Tree(id=1, text=True))) == 1
    assert page.take(turns("ab"), 0, Tree(id=1, text=True)) == []
    assert page.next == Place(branch="a", position=0)


def test_turns_without_tokens_are_left_out() -> None:
    page = _Page(1000)
    shown = page.take(turns("ab", "", "c"), 1, Tree(id=1, text=True))
    assert [(turn.start, turn.end) for turn in shown] == [(2, 3)]
    assert page.size == 101


def test_an_input_shows_its_messages_with_its_text_alone() -> None:
    said = ChatMessage(role="user", content="x")
    segment = InputSegment(
        3, letters("<x>"), "<x>", tail=Tail.CLOSED, op=4, role="user", messages=[said]
    )
    both = segment_state(segment, True, True)
    assert (both.kind, both.start, both.end, both.op, both.role) == ("input", 3, 6, 4, "user")
    assert (both.text, both.tokens, both.messages) == ("<x>", list(map(ord, "<x>")), [said])
    bare = segment_state(segment, False, False)
    assert (bare.text, bare.tokens, bare.messages) == (None, None, None)


@pytest.mark.parametrize(("ended", "end"), [(False, 6), (True, 7)])
def test_an_output_that_is_being_written_shows_what_is_released(ended: bool, end: int) -> None:
    segment = OutputSegment(3, op=7)
    segment.tokens.extend([5, 6, 7, 8])
    segment.release(3, "abc")
    segment.ended = ended
    shown = segment_state(segment, True, True)
    assert (shown.kind, shown.start, shown.end, shown.text) == ("output", 3, end, "abc")
    assert (shown.tokens, shown.messages) == ([5, 6, 7, 8][: end - 3], None)


def test_a_state_tells_of_a_fork_where_it_was() -> None:
    branch = SessionBranch("b", 1, of=Label("a"), at=0)
    state = branch_state(branch, 0, turns_from=3)
    assert (state.parent, state.at, state.turns, state.turns_from) == ("a", 0, None, 3)
