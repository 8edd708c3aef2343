"""Messages from a tree, from files and to files."""

from pathlib import Path
from typing import Any

import pytest

from ramify.clients.commands import branch_transcript
from ramify.clients.commands.branch_transcript import Attached
from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import MARK
from ramify.protocol.wire import ChatMessage, Rollback, SegmentState


def turn(kind: Any, start: int, op: int, *said: tuple[Any, str], **fields: Any) -> SegmentState:
    messages = [ChatMessage(role=role, content=text) for role, text in said] or None
    return SegmentState(kind=kind, start=start, end=start + 2, op=op, messages=messages, **fields)


def said(*turns: SegmentState) -> list[tuple[str, str, int]]:
    found = branch_transcript.of_turns(turns)
    return [(entry.message.role, entry.message.content, entry.start) for entry in found.entries]


USER = turn("input", 0, 1, ("user", "hi"), role="user", text="<u>hi")
PROMPT = turn("input", 2, 1, role="assistant", text="<a>")
ANSWER = turn("output", 4, 2, role="assistant", text="yes")


def test_a_turn() -> None:
    assert said(USER, PROMPT, ANSWER) == [("user", "hi", 0), ("assistant", "yes", 4)]
    assert said(USER, PROMPT) == [("user", "hi", 0)]


def test_an_answer_that_goes_on_is_one_message() -> None:
    more = turn("output", 8, 4, role="assistant", text=", sir")
    mouth = turn("input", 6, 3, role="assistant", text=" indeed")  # put into its mouth
    assert said(USER, PROMPT, ANSWER, mouth, more)[1] == ("assistant", "yes indeed, sir", 4)


def test_two_answers_are_two() -> None:
    again = turn("input", 6, 3, ("user", "so?"), role="user", text="<u>so?")
    prompt = turn("input", 8, 3, role="assistant", text="<a>")
    second = turn("output", 10, 4, role="assistant", text="no")
    assert [text for _, text, _ in said(USER, PROMPT, ANSWER, again, prompt, second)] == [
        "hi",
        "yes",
        "so?",
        "no",
    ]


def test_appended_answers_keep_their_own() -> None:
    pair = turn("input", 0, 1, ("user", "hi"), ("assistant", "x"), role="assistant", text="...")
    assert said(pair) == [("user", "hi", 0), ("assistant", "x", 0)]


def test_raw_text_is_no_message() -> None:
    raw = turn("input", 0, 1, text="Once")
    found = branch_transcript.of_turns([raw, turn("output", 2, 2, text=" upon")])
    assert found.raw
    assert found.entries == []
    assert found.copy().raw


def test_cut() -> None:
    found = branch_transcript.of_turns([USER, PROMPT, ANSWER])
    copy = found.copy()
    found.cut(4)
    assert [message.content for message in found.messages] == ["hi"]
    found.cut(0)
    assert (found.messages, len(copy.messages)) == ([], 2)


def test_groups_are_turns_that_undo_takes_back() -> None:
    roles: list[Any] = ["system", "user", "assistant", "user", "tool", "assistant", "assistant", "user"]
    made = branch_transcript.groups([ChatMessage(role=role, content="") for role in roles])
    assert [[message.role for message in group] for group in made] == [
        ["system"],
        ["user", "assistant"],
        ["user"],
        ["tool", "assistant", "assistant"],
        ["user"],
    ]


def test_a_file_comes_back(tmp_path: Path) -> None:
    messages = [
        ChatMessage(role="user", content="né\n"),
        ChatMessage(role="assistant", tool_calls=[{"name": "f", "arguments": {}}]),
    ]
    branch_transcript.write(tmp_path / "a.json", "m", "main", messages)
    assert branch_transcript.read(tmp_path / "a.json") == messages
    (tmp_path / "b.json").write_text('[{"role": "user", "content": "x"}]')
    assert branch_transcript.read(tmp_path / "b.json") == [ChatMessage(role="user", content="x")]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "it is not JSON"),
        ("3", "not a list of messages"),
        ("{}", "not a list of messages"),
        ("[]", "holds no messages"),
        ('[{"role": "nobody"}]', r"Invalid enum value 'nobody'.*\$\[0\]\.role"),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_files_that_hold_no_messages(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(BadRequest, match=fault):
        branch_transcript.read(tmp_path / "a.json")


def test_a_message_with_pictures_is_one_and_is_said_again_with_them() -> None:
    """A server shows it in pieces, and no files: those are known here."""
    content = f"{MARK}{MARK}what?"
    turns = [
        SegmentState(
            kind="input",
            start=0,
            end=3,
            op=1,
            role="user",
            text="<",
            messages=[ChatMessage(role="user", content=content)],
        ),
        *(
            SegmentState(kind="input", start=3 + i, end=4 + i, op=1, role="user", text=text)
            for i, text in enumerate((MARK, MARK, "what?>"))
        ),
        SegmentState(kind="input", start=6, end=7, op=1, role="assistant", text="<a>"),
        SegmentState(kind="output", start=7, end=9, op=2, role="assistant", text="This."),
    ]
    found = branch_transcript.of_turns(turns)
    assert not found.raw
    assert [each.content for each in found.messages] == ["[picture][picture]what?", "This."]
    assert branch_transcript.before_answer("main", turns) == [Rollback(id=0, branch="main", to=7)]
    before = branch_transcript.BranchTranscript()
    before.add("user", "what?", 0, [Attached("a.png", b"1"), Attached("b.png", b"2")])
    found.recall(before)
    assert found.messages[0].content == "[picture: a.png][picture: b.png]what?"
    (again,) = branch_transcript.appends("main", found.entries)
    assert again.images == [b"1", b"2"]
    assert again.messages is not None
    assert again.messages[0].content == content
