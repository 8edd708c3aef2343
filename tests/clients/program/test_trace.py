"""What a trace shows, without any server."""

import shutil
from pathlib import Path

import pytest

from ramify.clients.program import AsyncState, State, assistant, gen, program, select, user


@program
def tree(s: State, question: str) -> list[str]:
    s += user(question)
    forks = s.fork(2)
    for fork in forks:
        fork += assistant(gen("thought", stop="\n"))
    best = forks.prune(by="vote")
    best[0] += user("Which?") + assistant(select("which", choices=["a", "b"]))
    drafts = best[0].fork(2, hidden=True)
    for draft in drafts:
        draft += assistant("x", gen("draft"))
    drafts.join()
    best[0] += assistant(gen("end"))
    return [best[0]["end"], best[0]["thought"]]


def test_the_graph_of_a_whole_program(capsys: pytest.CaptureFixture[str]) -> None:
    graph = tree.trace('Say "why"?')
    assert graph.whole
    assert [name for name in graph.names if name] == [
        "thought",
        "thought",
        "which",
        "draft",
        "draft",
        "end",
    ]
    text = graph.show()
    assert capsys.readouterr().out.strip() == text.strip()
    assert text.startswith("flowchart TD\n")
    assert "prune program.1, program.2 by vote into program.3" in text
    assert "&quot;why&quot;" in text
    assert set(graph.edges()) >= {(0, 1), (1, 2)}
    assert all(a < b for a, b in graph.edges())
    assert graph.dot().startswith('digraph "tree" {')


def test_a_picture_needs_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tree.trace("Why?")
    if shutil.which("dot") is not None:
        graph.show(tmp_path / "tree.svg")
        assert b"<svg" in (tmp_path / "tree.svg").read_bytes()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="graphviz"):
        graph.show(tmp_path / "tree.svg")


@pytest.mark.parametrize(
    "use",
    [
        lambda text: f"{text}",
        lambda text: text == "yes",
        lambda text: int(text),
        lambda text: "a" in text,
        lambda text: text.strip(),
        lambda text: not text,
        lambda text: [*text],
        lambda text: isinstance(text, str),
        lambda text: {text: 1},
        lambda text: "x" + text,
        lambda text: "{}".format(text),  # noqa: UP032
    ],
)
def test_whatever_needs_a_text_ends_the_trace_there(use: object) -> None:
    @program
    def using(s: State) -> None:
        s += user("Q") + assistant(gen("a"))
        use(s["a"])  # type: ignore[operator]
        s += user("R") + assistant(gen("b"))

    graph = using.trace()
    assert not graph.whole
    assert "test_trace.py" in graph.stops[0]
    assert "'a'" in graph.stops[0]
    assert "not one frame" in graph.mermaid()
    assert [name for name in graph.names if name] == ["a"]


def test_a_text_may_be_passed_on(tmp_path: Path) -> None:
    @program
    async def passes(s: AsyncState) -> dict[str, str]:
        s += user("Q") + assistant(gen("a"))
        kept = [await s["a"]]
        s += user("R") + assistant(gen("b"))
        return {"a": kept[0], "b": await s["b"], "all": await s.text()}

    graph = passes.trace()
    assert graph.whole
    assert [name for name in graph.names if name] == ["a", "b"]


def test_marks_are_forks() -> None:
    @program
    def marks(s: State) -> str:
        s += user("Q")
        mark = s.mark()
        s += assistant(gen("a"))
        s.rollback(mark)
        s += assistant(gen("b"))
        return s["b"]

    graph = marks.trace()
    assert graph.whole
    assert graph.labels()[2:] == [
        "fork program into program.1",
        "generate a on program",
        "fork program.1 into program.1.1",
        "program goes on as program.1.1",
        "generate b on program",
    ]
    assert [edge for edge in graph.edges() if edge[1] == 5] == [(3, 5), (4, 5)]
