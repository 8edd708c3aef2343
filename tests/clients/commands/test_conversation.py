"""The talk of `ramify chat` with a scripted session: no server, no terminal."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.clients.commands.conversation import (
    Conversation,
    Screen,
    decode_rate,
    describe,
    draw_tree,
    set_option,
)
from ramify.clients.errors import SessionLost
from ramify.clients.generation import Result
from ramify.clients.handles import GenerateOptions
from ramify.clients.stream import TextDelta
from ramify.clients.sync import SyncGeneration
from ramify.protocol.errors import BadRequest, TooLong
from ramify.protocol.wire import BranchState, Hit, Ok, Op, State, Turn, Usage

USAGE = Usage(
    prompt=10, cached=6, computed=4, output=5, forced=0, hit=Hit(), queue_ms=0, ttft_ms=20, total_ms=60
)


class ScriptedGeneration(SyncGeneration):
    def __init__(self, branch: str, steps: list[Any]) -> None:
        self.steps, self.name, self.cancelled = steps, branch, False

    def __iter__(self) -> Iterator[TextDelta]:  # type: ignore[override]
        for step in self.steps:
            if isinstance(step, BaseException):
                raise step
            yield TextDelta(self.name, 1, step)

    def cancel(self) -> None:
        self.cancelled = True

    def result(self) -> Result:
        reason: Any = "cancelled" if self.cancelled else "stop"
        return Result(branch=self.name, text="", reason=reason, usage=USAGE, position=15)


class ScriptedBranch:
    def __init__(self, session: "ScriptedSession", name: str) -> None:
        self.session, self.name, self.position = session, name, 15

    def chat(self, text: str, **options: Any) -> ScriptedGeneration:
        self.session.calls.append(("chat", self.name, text, options))
        return ScriptedGeneration(self.name, self.session.answers.pop(0))

    def fork(self, name: str) -> None:
        self.session.calls.append(("fork", self.name, name))
        self.session.branches.append(ScriptedBranch(self.session, name))

    def rollback(self, **where: int) -> Ok:
        self.session.calls.append(("rollback", self.name, where))
        return Ok(id=1, position=3)

    def say(self, text: str, *, role: str) -> None:
        self.session.calls.append(("say", self.name, text, role))

    def tree(self, *, text: bool) -> BranchState:
        turns = [Turn(kind="input", start=0, end=3, role="user", text="hi")]
        return BranchState(branch=self.name, position=3, turns=turns)


class ScriptedSession:
    model = "m"
    error: Exception | None = None

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.calls: list[Any] = []
        self.main = ScriptedBranch(self, "main")
        self.branches = [self.main]

    def branch(self, name: str) -> ScriptedBranch:
        return next(branch for branch in self.branches if branch.name == name)

    def tree(self) -> State:
        branches = [BranchState(branch=b.name, position=3) for b in self.branches]
        return State(session="s", op=1, revision=1, branches=branches)

    def send(self, ops: list[Op]) -> list[Any]:
        self.calls.append(("send", [type(op).__name__ for op in ops]))
        return [None, None, ScriptedGeneration("main", self.answers.pop(0))]


def talk(session: ScriptedSession, *lines: Any, colour: bool = False) -> tuple[str, str, list[str]]:
    """What was written to `out` and `notes`, and the prompts."""
    script, prompts = list(lines), []

    def read(prompt: str) -> str | None:
        prompts.append(prompt)
        line = script.pop(0) if script else None
        if isinstance(line, BaseException):
            raise line
        return line

    screen = Screen(io.StringIO(), io.StringIO(), colour)
    Conversation(session, read, screen, GenerateOptions()).run()  # type: ignore[arg-type]
    return screen.out.getvalue(), screen.notes.getvalue(), prompts  # type: ignore[attr-defined]


def test_a_turn() -> None:
    session = ScriptedSession(["Par", "is"])
    out, notes, prompts = talk(session, "Capital?", "")
    assert out == "Paris\n"
    assert notes == "5 tokens, 100.0 tok/s, first after 20 ms, 6 of 10 prompt tokens cached\n"
    assert session.calls == [("chat", "main", "Capital?", {})]
    assert prompts == ["> "] * 3


def test_notes_are_dim_on_a_terminal() -> None:
    _, notes, _ = talk(ScriptedSession(["x"]), "hi", colour=True)
    assert notes.startswith("\x1b[2m5 tokens")


def test_several_lines() -> None:
    session = ScriptedSession(["ok"], ["ok"])
    _, _, prompts = talk(session, "a\\", "b\\", "c", "d\\")
    assert [call[2] for call in session.calls] == ["a\nb\nc", "d"]
    assert prompts[:4] == ["> ", "... ", "... ", "> "]


def test_ctrl_c_stops_an_answer_and_stays() -> None:
    session = ScriptedSession(["half", KeyboardInterrupt()], ["rest"])
    out, notes, _ = talk(session, "one", KeyboardInterrupt(), "two")
    assert out == "half\nrest\n"
    assert "cancelled" in notes
    assert "Ctrl-D" in notes


def test_an_error_of_a_turn_is_told() -> None:
    session = ScriptedSession([TooLong("too long: shorten it")], ["fine"])
    out, notes, _ = talk(session, "one", "two")
    assert "too long: shorten it" in notes
    assert out == "\nfine\n"


def test_the_end_of_the_session_ends_the_talk() -> None:
    session = ScriptedSession([SessionLost("gone")])
    session.error = SessionLost("gone")
    with pytest.raises(SessionLost):
        talk(session, "one", "two")


def test_branches() -> None:
    session = ScriptedSession(["x"], ["y"])
    _, notes, prompts = talk(
        session,
        "hi",
        "/fork alt",
        "/switch alt",
        "more",
        "/tree",
        "/switch none",
        "/fork a b",
        "/quit",
        "no",
    )
    assert [call[:2] for call in session.calls] == [("chat", "main"), ("fork", "main"), ("chat", "alt")]
    assert "alt> " in prompts
    assert "* alt: 3 tokens" in notes
    assert "there is no branch 'none': main, alt" in notes
    assert "use /fork NAME" in notes


def test_undo_and_retry() -> None:
    session = ScriptedSession(["x"], ["again"])
    out, notes, _ = talk(session, "/retry", "hi", "/retry", "/undo", "/retry")
    assert out == "x\nagain\n"
    assert ("send", ["Rollback", "Append", "Generate"]) in session.calls
    assert ("rollback", "main", {"turns": 1}) in session.calls
    assert notes.count("nothing was said here yet") == 2
    assert "back at token 3" in notes


def test_set_system_save_help(tmp_path: Path) -> None:
    session = ScriptedSession(["x"])
    file = tmp_path / "a b.json"
    _, notes, _ = talk(
        session,
        "/set",
        "/set temperature 0",
        "/set max_tokens many",
        "/set",
        "hi",
        "/set temperature",
        "/system be brief",
        "/system",
        f"/save '{file}'",
        "/save",
        f"/save {tmp_path}",
        "/help",
        "/nope",
    )
    assert session.calls[0] == ("chat", "main", "hi", {"temperature": 0})
    assert "all defaults" in notes
    assert '{"temperature": 0}' in notes
    assert "max_tokens: Expected `int`" in notes
    assert ("rollback", "main", {"to": 0}) in session.calls
    assert ("say", "main", "be brief", "system") in session.calls
    saved = json.loads(file.read_text())
    assert saved["turns"] == [{"role": "user", "text": "hi", "start": 0, "end": 3}]
    assert "use /system TEXT" in notes
    assert "use /save FILE" in notes
    assert "cannot save" in notes
    assert "/switch NAME" in notes
    assert "/nope is no command" in notes


def test_options() -> None:
    options = GenerateOptions()
    set_option(options, "temperature", "0.5")
    set_option(options, "stop", '["a"]')
    assert options == {"temperature": 0.5, "stop": ["a"]}
    set_option(options, "stop", "")
    assert options == {"temperature": 0.5}
    with pytest.raises(BadRequest, match="no generation option"):
        set_option(options, "heat", "1")
    with pytest.raises(BadRequest, match="temperature"):
        set_option(options, "temperature", "-1")


def test_describe() -> None:
    result = Result(branch="main", text="", reason="length", usage=USAGE, position=1)
    assert describe(result).endswith("cached, length")
    one = Usage(
        prompt=1,
        cached=0,
        computed=1,
        output=1,
        forced=0,
        hit=Hit(),
        queue_ms=0,
        ttft_ms=None,
        total_ms=0,
    )
    assert decode_rate(one) is None
    assert "tok/s" not in describe(Result(branch="b", text="", reason="stop", usage=one, position=1))


def test_tree() -> None:
    branches = [
        BranchState(branch="main", position=9),
        BranchState(branch="a", position=12, parent="main", at=9, running=3),
        BranchState(branch="b", position=13, parent="a", at=12),
        BranchState(branch="orphan", position=1, parent="dropped", at=1),
    ]
    assert draw_tree(branches, "a").splitlines() == [
        "  main: 9 tokens",
        "*   a from 9: 12 tokens, generating",
        "      b from 12: 13 tokens",
        "  orphan from 1: 1 tokens",
    ]
