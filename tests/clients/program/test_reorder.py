"""Constant lines before those that vary: what is moved, what is not, and what is said about it."""

import json
from typing import Any

import pytest

from ramify.clients.program import (
    AsyncState,
    State,
    assistant,
    gen,
    program,
    select,
    system,
    user,
)
from ramify.protocol.wire import Append


def sent(graph: Any) -> list[str]:
    """The texts that a traced program appends."""
    out = []
    for op in graph.ops:
        if isinstance(op, Append):
            out += [turn.content for turn in op.messages or ()] or [op.text]
    return out


@program
def ask(s: State, question: str, reasons: int = 3) -> str:
    s += system("You are terse.")
    s += user(f"Question: {question}\nGive {reasons} reasons.\n\nAnswer in one word.\nBe kind.")
    s += assistant(gen("a"))
    s += user(f"Why {question}?\nTell me.") + assistant(gen("b"))
    return s["b"]


def test_nothing_moves_unless_asked() -> None:
    graph = ask.trace("Why?")
    assert sent(graph)[1].startswith("Question: Why?\n")
    assert graph.moved == []
    assert "reordered" not in graph.mermaid()


def test_lines_without_arguments_come_first() -> None:
    graph = ask.using(reorder=True).trace("Who\nor what?", 4)
    assert graph.whole
    assert sent(graph) == [
        "You are terse.",
        "Answer in one word.\nBe kind.\n\nQuestion: Who\nor what?\nGive 4 reasons.",
        "Why Who\nor what??\nTell me.",  # behind a text that varies nothing is shared
    ]
    (moved,) = graph.moved
    assert moved == (
        "on program, user: 'Answer in one word.' and 1 more now before what varies (question, reasons)"
    )
    assert f"%% reordered {moved}" in graph.mermaid()


@pytest.mark.parametrize(
    "write",
    [
        lambda q: f"Q: {q}\nA.",
        lambda q: f"Q: {q:>30}\nA.",
        lambda q: f"Q: {q!r}\nA.",
        lambda q: "Q: " + q + "\nA.",
        lambda q: "Q: {}\nA.".format(q),  # noqa: UP032
        lambda q: "Q: %s\nA." % q,  # noqa: UP031
        lambda q: "\n".join(["Q: " + q, "A."]),
        lambda q: "".join(["Q: ", q, "\nA."]),
        lambda q: f"Q: {q.strip().upper()}\nA.",
        lambda q: f"Q: {q.split()[0]}\nA.",
        lambda q: f"Q: {q[:4]}\nA.",
        lambda q: f"Q: {json.dumps({'q': q})}\nA.",
        lambda q: str(q) + "\nA.",
    ],
)
def test_arguments_are_known_in_what_is_made_of_them(write: Any) -> None:
    @program
    def one(s: State, question: str) -> None:
        s += user(write(question)) + assistant(gen("a"))

    question = "What is it?"
    (text,) = sent(one.using(reorder=True).trace(question))
    first, _, rest = write(question).partition("\n")
    assert text == f"{rest}\n{first}"


def test_an_argument_is_what_it_was_for_python() -> None:
    """Only in text that is made of it there are marks, while it is traced."""

    @program
    def picky(s: State, name: str, number: int, items: list[str], table: dict[str, float]) -> None:
        assert name == "Rom"
        assert {"Rom": 1}[name] == 1
        assert len(name) == 3
        assert isinstance(name, str)
        assert json.loads(json.dumps([name, number])) == ["Rom", 7]
        assert number + 1 == 8
        assert [1, 2, 3, 4, 5, 6, 7, 8][number] == 8
        assert sorted(items) == ["a", "b"]
        assert table["x"] * 2 == 3.0
        s += user(f"{name} {number} {table['x']}\nConstant.") + assistant(gen("a"))

    graph = picky.using(reorder=True).trace("Rom", 7, ["b", "a"], {"x": 1.5})
    assert sent(graph) == ["Constant.\nRom 7 1.5"]
    assert "(name, number, table)" in graph.moved[0]


async def test_raw_text_and_each_branch_that_is_the_same_so_far() -> None:
    @program
    async def work(s: AsyncState, topic: str) -> str:
        s += "Rules.\n"
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f"Topic: {topic}\nPart {i}.\n" + select("pick", ["a", "b"])
        s += gen("own")
        s += f"Topic: {topic}\nBehind a gap."
        return await s["own"]

    graph = await work.using(reorder=True).atrace("sleep")
    assert sent(graph)[1:] == [
        "Part 0.\nTopic: sleep\n",
        "Part 1.\nTopic: sleep\n",
        "Topic: sleep\nBehind a gap.",
    ]
    assert len(graph.moved) == 2


def test_a_text_without_constant_lines_stays() -> None:
    @program
    def one(s: State, question: str) -> None:
        s += user(f"Always.\nQ: {question}") + assistant(gen("a"))

    graph = one.using(reorder=True).trace("Why?")
    assert sent(graph) == ["Always.\nQ: Why?"]
    assert graph.moved == []


def test_what_the_function_raises_is_raised() -> None:
    @program
    def broken(s: State, question: str) -> None:
        raise ValueError(question)

    with pytest.raises(ValueError, match="Why"):
        broken.using(reorder=True).trace("Why?")
