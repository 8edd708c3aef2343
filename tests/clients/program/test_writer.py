"""The writer: from what a program adds to the ops of its branch."""

import pytest

from ramify.clients.program import assistant, gen, image, system, user
from ramify.clients.program.expressions import Expression, flatten
from ramify.clients.program.writer import Writer
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Append, ChatMessage, Generate, Op


def ops(*expressions: Expression, writer: Writer | None = None) -> list[list[Op]]:
    """What is sent for each gap, then what waits."""
    writer = writer or Writer("b")
    runs = [run for each in expressions for run, _ in writer.write(flatten(each))]
    return [*runs, writer.flush()]


def append(text: str | None = None, **messages: str) -> Append:
    turns = [ChatMessage(role=role, content=text) for role, text in messages.items()]  # type: ignore[arg-type]
    return Append(id=0, branch="b", text=text, messages=turns or None)


def test_text_outside_of_turns_is_raw() -> None:
    assert ops("a", "b" + gen("x", max_tokens=3), "c") == [
        [append("ab"), Generate(id=0, branch="b", max_tokens=3)],
        [append("c")],
    ]


def test_turns_become_messages_of_one_append() -> None:
    assert ops(system("S") + user("U", "V"), assistant(gen("x"))) == [
        [append(system="S", user="UV"), Generate(id=0, branch="b")],
        [],
    ]


def test_a_turn_with_text_around_its_gaps_stays_open_between_them() -> None:
    assert ops(user("U") + assistant("A", gen("x", stop="."), "B", gen("y"), "C"), user("D")) == [
        [append(user="U"), append("A"), Generate(id=0, branch="b", stop=["."], keep_open=True)],
        [append("B"), Generate(id=0, branch="b", keep_open=True)],
        [append("C"), append(user="D")],
    ]


def test_how_a_program_is_cut_into_additions_changes_nothing() -> None:
    whole = ops(user("U") + assistant("A" + gen("x")) + "raw" + "text")
    assert ops(user("U"), assistant("A", gen("x")), "raw", "text") == whole


def test_defaults_are_for_gaps_that_do_not_say() -> None:
    writer = Writer("b", {"temperature": 0.0, "max_tokens": 5})
    first, second, _ = ops(gen(max_tokens=1), gen(), writer=writer)
    assert first == [Generate(id=0, branch="b", temperature=0.0, max_tokens=1)]
    assert second == [Generate(id=0, branch="b", temperature=0.0, max_tokens=5)]


def test_a_child_goes_on_where_its_parent_was() -> None:
    writer = Writer("b")
    writer.write(flatten(user("U") + assistant(gen("x"))))
    child = writer.fork("c")
    ((sent, _),) = child.write(flatten(user("V") + assistant(gen("y"))))
    assert [op.branch for op in sent if isinstance(op, Append | Generate)] == ["c", "c"]
    assert len(writer.record) == 2
    assert len(child.record) == 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (user(gen("x")), "gen\\(\\) stands in a 'user' turn"),
        (user(assistant("x")), "'assistant' turn stands inside a 'user' turn"),
        (3, "not int: use str"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: Expression, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        list(flatten(wrong))


def test_pictures_go_with_the_op_that_has_their_marks() -> None:
    said = ops(user("A ", image(b"cat"), image(b"dog")), assistant(gen("a")), image(b"cow"), "?")
    first, last = said[0][0], said[-1][-1]
    assert isinstance(first, Append)
    assert isinstance(last, Append)
    assert first.messages is not None
    assert (first.messages[0].content, first.images) == ("A \ufffc\ufffc", [b"cat", b"dog"])
    assert (last.text, last.images) == ("\ufffc?", [b"cow"])
    with pytest.raises(BadRequest, match="0 bytes"):
        image(b"")
