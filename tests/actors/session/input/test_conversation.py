"""The messages of a branch, read off segments made by hand. Whole chats: test_conversations.py."""

from array import array
from typing import Any

import pytest

from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import History, InputSegment, OutputSegment, Tail
from ramify.actors.session.input.conversation import (
    Border,
    Conversation,
    borders,
    common,
    common_prefix,
    history_before,
)
from ramify.protocol.wire import ChatMessage


def said(role: Any, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)


class Build:
    """A branch whose tokens are letters."""

    def __init__(self) -> None:
        self.branch = SessionBranch("a", 1)

    def turn(self, text: str, *messages: ChatMessage, **fields: Any) -> "Build":
        given = {
            "tail": Tail.CLOSED,
            "chat": True,
            "turn": 1,
            "role": "user",
            "messages": messages,
        } | fields
        letters = array("i", map(ord, text))
        self.branch.segments.append(InputSegment(self.branch.position, letters, text, **given))
        return self

    def raw(self, text: str) -> "Build":
        return self.turn(text, tail=Tail.RAW, chat=False, turn=0, role=None)

    def put(self, text: str) -> "Build":
        """Text that is put into the assistant's mouth."""
        return self.turn(text, tail=Tail.OPEN, chat=False, turn=0, role="assistant")

    def output(self, *chunks: str, tail: Tail = Tail.OPEN, **fields: Any) -> "Build":
        segment = OutputSegment(self.branch.position)
        for chunk in chunks:
            segment.tokens.extend(map(ord, chunk))
            segment.release(len(segment.tokens), chunk)
        segment.ended, segment.tail = True, tail
        for name, value in fields.items():
            setattr(segment, name, value)
        if segment.eos_text:
            segment.tokens.append(0)
        self.branch.segments.append(segment)
        return self

    def messages(self) -> list[tuple[str, str]]:
        return [(each.role, each.content) for each in Conversation.of(self.branch.segments).messages]


def test_text_of_an_open_turn_is_one_message() -> None:
    built = Build().turn("<u>Q", said("user", "Q")).put("One, ").output("two", ", ").output("three")
    assert built.messages() == [("user", "Q"), ("assistant", "One, two, three")]


def test_a_complete_answer_is_a_message_of_its_own() -> None:
    built = Build().turn("<u>Q", said("user", "Q")).output("A", tail=Tail.EOS).output("B")
    assert built.messages() == [("user", "Q"), ("assistant", "A"), ("assistant", "B")]


def test_what_an_answer_said_in_the_end_replaces_its_parts() -> None:
    """With calls, a turn's text cannot say what it was."""
    spoken = said("assistant", "whole")
    built = Build().turn("<u>Q", said("user", "Q")).output("wh").output("ole", spoken=spoken)
    assert built.messages() == [("user", "Q"), ("assistant", "whole")]
    alone = Build().turn("<u>Q", said("user", "Q")).output("ole", spoken=spoken).output("more")
    assert alone.messages() == [("user", "Q"), ("assistant", "whole"), ("assistant", "more")]


def test_an_appended_turn_of_the_assistant_goes_on_only_if_it_is_open() -> None:
    for tail, expected in (
        (Tail.OPEN, [("assistant", "AB")]),
        (Tail.CLOSED, [("assistant", c) for c in "AB"]),
    ):
        built = Build().turn("<a>A", said("assistant", "A"), tail=tail, role="assistant").output("B")
        assert built.messages() == expected


def test_a_conversation_begins_behind_the_last_raw_text() -> None:
    built = Build().turn("<u>old", said("user", "old")).raw("text").turn("<u>Q", said("user", "Q"))
    found = Conversation.of(built.branch.segments)
    assert found.base == len("<u>oldtext")
    assert built.messages() == [("user", "Q")]
    assert [(segment.text, index) for segment, index in found.turns] == [("<u>Q", 0)]
    assert Conversation.of(Build().turn("<u>Q").branch.segments).base == 0


def never(text: str, char: int) -> bool:
    return False


def test_how_far_a_rendering_agrees() -> None:
    built = Build().raw("raw").turn("<u>Q", said("user", "Q")).output("an", "sw", "er")
    branch = built.branch
    assert common(branch, 3, "<u>Qanswer</a>", never) == (13, 10)
    assert common(branch, 3, "<u>Qansxx", never) == (9, 6)  # the last mark before the difference
    assert common(branch, 3, "<u>Qanswx", never) == (11, 8)
    assert common(branch, 3, "<u>Qx", never) == (7, 4)
    assert common(branch, 3, "<u>X", never) == (3, 0)
    assert common(branch, 0, "rawX", never) == (3, 3)


def test_a_rendering_does_not_agree_inside_a_token_that_it_writes() -> None:
    """A mark is no border where the new text has a control token around it."""
    built = Build().turn("<u>Q", said("user", "Q")).output("an", "<e", "nd")
    inside = {6, 8}

    def within(text: str, char: int) -> bool:
        return char in inside

    assert common(built.branch, 0, "<u>Qan<eXX", never) == (8, 8)
    assert common(built.branch, 0, "<u>Qan<eXX", within) == (4, 4)
    inside = {8}
    assert common(built.branch, 0, "<u>Qan<eXX", within) == (6, 6)


def test_the_mark_behind_an_end_of_turn_is_before_its_token() -> None:
    built = Build().turn("<u>Q", said("user", "Q")).output("an", "sw", tail=Tail.EOS, eos_text="<end>")
    assert built.branch.position == 9
    assert common(built.branch, 0, "<u>Qansw<end>", never) == (9, 13)
    assert common(built.branch, 0, "<u>Qansw<other>", never) == (8, 8)
    built = Build().turn("<u>Q", said("user", "Q")).output("an", tail=Tail.EOS, eos_text="<end>")
    built.branch.segments[-1].counts[-1] = 3  # the last mark is behind the token
    assert common(built.branch, 0, "<u>Qan<other>", never) == (6, 6)


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [("", "", 0), ("abc", "abd", 2), ("abc", "abc", 3), ("abc", "ab", 2), ("x", "y", 0)],
)
def test_common_prefix(a: str, b: str, length: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == length


def segment(raw: str, start: int, turn: int = 1, op: int = 7) -> InputSegment:
    letters = array("i", map(ord, raw))
    return InputSegment(start, letters, raw, tail=Tail.CLOSED, turn=turn, op=op, chat=True)


def unknown(message: int) -> str:
    return ""


def test_turns_that_look_as_before_have_their_old_borders() -> None:
    lost = [(segment("<u>one", 0), 0), (segment("<u>two", 9), 2)]
    found = borders("<u>one<a>A<u>two<u>new", (0, 0), lost, Border(16, 4, 1), unknown)
    assert found == [Border(0, 0, 1, 7), Border(10, 2, 1, 7), Border(16, 4, 1)]


def test_a_turn_that_is_not_found_is_a_part_of_the_one_before_it() -> None:
    lost = [(segment("<u>one", 0), 0), (segment("<u>two", 9), 2)]
    found = borders("<u>one<u>TWO<u>new", (0, 0), lost, Border(12, 4, 1), unknown)
    assert found == [Border(0, 0, 2, 7), Border(12, 4, 1)]


def test_a_turn_begins_where_the_message_before_it_ends() -> None:
    lost = [(segment("<u>one", 0), 0), (segment("<u>two", 9), 2)]
    found = borders("<u>one A.<u>TWO<u>new", (0, 0), lost, Border(15, 4, 1), lambda message: "A.")
    assert found == [Border(0, 0, 1, 7), Border(9, 2, 1, 7), Border(15, 4, 1)]


def test_turns_without_a_place_count_for_the_rest_that_is_new() -> None:
    lost = [(segment("<u>two", 9), 2)]
    found = borders("..<u>TWO<u>new", (4, 2), lost, Border(8, 4, 1), unknown)
    assert found == [Border(2, 4, -1), Border(8, 4, 1)]
    found = borders("..rest<u>new", (4, 2), [], Border(6, 4, 1), unknown)
    assert found == [Border(2, 4, 0), Border(6, 4, 1)]
    assert borders("..<u>new", (4, 2), [], Border(2, 4, 1), unknown) == [Border(2, 4, 1)]


def test_a_conversation_may_begin_with_the_assistant() -> None:
    assert Build().put("A").messages() == [("assistant", "A")]
    assert Build().output("A").output("B").messages() == [("assistant", "AB")]


def test_what_a_history_says_replaces_what_stands_before() -> None:
    """And an open turn before it is not gone on with."""
    told = History(None, [said("user", "old")])
    built = Build().put("A").turn("<u>Q", said("user", "Q"), history=told).output("B")
    assert built.messages() == [("user", "old"), ("user", "Q"), ("assistant", "B")]
    put = Build().put("A").turn("B", tail=Tail.OPEN, chat=False, role="assistant", history=told)
    assert put.messages() == [("user", "old"), ("assistant", "B")]


def test_a_turn_without_messages_is_not_open() -> None:
    built = Build().turn("<a>", tail=Tail.OPEN, role="assistant").output("B")
    assert built.messages() == [("assistant", "B")]
    user = Build().turn("<u>Q", said("user", "Q"), tail=Tail.OPEN, role="user").output("B")
    assert user.messages() == [("user", "Q"), ("assistant", "B")]


def test_appended_turns_are_known_with_the_place_of_their_first_message() -> None:
    built = (
        Build()
        .turn("<s>S<u>Q", said("system", "S"), said("user", "Q"))
        .turn("more", said("user", "more"), turn=0)
        .turn("<u>R", said("user", "R"))
    )
    found = Conversation.of(built.branch.segments)
    assert [(segment.text, index) for segment, index in found.turns] == [("<s>S<u>Q", 0), ("<u>R", 3)]


def test_a_history_shares_what_the_branch_knows_of_it() -> None:
    told = History(None, [said("user", "old"), said("assistant", "A")])
    built = Build().turn("<u>Q", said("user", "Q")).turn("<u>R", said("user", "R"), history=told)
    messages = [*told.messages, said("user", "R"), said("user", "S")]
    shared = history_before(built.branch, 0, built.branch.position, messages)
    assert shared.before is told
    assert list(shared.messages) == messages[2:]
    for base, at in ((0, built.branch.position - 1), (5, built.branch.position)):
        alone = history_before(built.branch, base, at, messages)
        assert (alone.before, list(alone.messages)) == (None, messages)
    assert history_before(built.branch, 4, built.branch.position, messages).before is told


def test_what_follows_an_answer_that_is_complete_is_another() -> None:
    spoken = said("assistant", "whole")
    built = Build().put("A").output("ole", spoken=spoken).output("more")
    assert built.messages() == [("assistant", "whole"), ("assistant", "more")]


def test_equal_turns_have_a_border_each() -> None:
    lost = [(segment("<u>one", 0), 0), (segment("<u>one", 9), 2)]
    found = borders("<u>one<a>A<u>one<u>new", (0, 0), lost, Border(16, 4, 1), unknown)
    assert found == [Border(0, 0, 1, 7), Border(10, 2, 1, 7), Border(16, 4, 1)]


def test_a_new_turn_never_begins_before_what_is_new() -> None:
    assert borders("..x", (4, 2), [], Border(0, 4, 1), unknown) == [Border(2, 4, 1)]
    first = [(segment("<u>one", 0), 0)]
    found = borders("<u>onenew", (0, 0), first, Border(0, 1, 1), unknown)
    assert found == [Border(0, 0, 1, 7), Border(0, 1, 1)]


def test_a_turn_may_be_found_where_the_new_text_begins() -> None:
    lost = [(segment("<u>two", 9), 2)]
    found = borders("<u>two<u>new", (4, 0), lost, Border(6, 4, 1), unknown)
    assert found == [Border(0, 2, 1, 7), Border(6, 4, 1)]


@pytest.mark.parametrize(("char", "place"), [(0, 2), (2, 2)])
def test_the_message_before_may_end_where_the_new_text_begins(char: int, place: int) -> None:
    """Its end may stand before that, and is asked for once."""
    asked: list[int] = []

    def end_of(message: int) -> str:
        asked.append(message)
        return "A."

    lost = [(segment("<u>two", 9), 2)]
    found = borders("A.<u>TWO<u>new", (4, char), lost, Border(8, 4, 1), end_of)
    turn = [Border(place, 2, 1, 7), Border(8, 4, 1)]
    assert found == (turn if char == place else [Border(char, 2, 0), *turn])
    assert asked == [1]


def test_the_first_message_has_none_before_it() -> None:
    lost = [(segment("<u>two", 9), 0)]
    found = borders("..TWO<u>new", (4, 2), lost, Border(5, 1, 1), lambda message: "..")
    assert found == [Border(2, 1, -1), Border(5, 1, 1)]
