"""The talk of `ramify chat` with a scripted session: no server, no terminal."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from ramify.clients.commands.branch_transcript import before_answer
from ramify.clients.commands.chat_session import RENEWALS, ChatSession
from ramify.clients.commands.describe import decode_rate, describe, draw_tree, duration, holding
from ramify.clients.commands.options import set_option
from ramify.clients.commands.screen import Screen
from ramify.clients.errors import SessionLost
from ramify.clients.generation import Result
from ramify.clients.options import GenerateOptions
from ramify.clients.stream import TextDelta
from ramify.clients.sync import SyncGeneration, SyncReply
from ramify.protocol.errors import BadRequest, TooLong
from ramify.protocol.wire import (
    Append,
    BranchState,
    ChatMessage,
    Constraint,
    Fork,
    Generate,
    Ok,
    Op,
    Rollback,
    SegmentState,
    StateReply,
    StructuralTag,
    Tag,
)
from tests.messages import usage

USAGE = usage(prompt=10, cached=6, computed=4, output=5, ttft_ms=20, total_ms=60)


class ScriptedGeneration(SyncGeneration):
    def __init__(self, branch: str, steps: list[Any]) -> None:
        self.steps, self.name, self.cancelled = steps, branch, False

    @property
    def text(self) -> str:
        return "".join(step for step in self.steps if isinstance(step, str))

    def __iter__(self) -> Iterator[TextDelta]:
        for step in self.steps:
            if isinstance(step, BaseException):
                raise step
            yield TextDelta(self.name, 1, step)

    def cancel(self) -> None:
        self.cancelled = True

    def result(self) -> Result:
        reason: Any = "cancelled" if self.cancelled else "stop"
        return Result(branch=self.name, text=self.text, reason=reason, usage=USAGE, position=15)


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

    def tree(self, *, text: bool = False) -> BranchState:
        reason = self.session.reason
        return BranchState(branch=self.name, position=15, turns=self.session.turns, reason=reason)

    def generate(self, **options: Any) -> ScriptedGeneration:
        self.session.calls.append(("generate", self.name, options))
        return ScriptedGeneration(self.name, self.session.answers.pop(0))


class ScriptedReply(SyncReply):
    def __init__(self) -> None:
        pass

    def result(self) -> list[Any]:
        return []


class ScriptedSession:
    model = "m"
    error: Exception | None = None
    connected = True
    reason: Any = None  # of the last generation's end
    keeping: Any = (600.0, None)

    def __init__(self, *answers: list[Any], turns: list[SegmentState] | None = None) -> None:
        self.answers = list(answers)
        self.turns = turns or []
        self.closed: bool | None = False
        self.kept: bool | None = None
        self.calls: list[Any] = []
        self.file = b""
        self.main = ScriptedBranch(self, "main")
        self.branches = [self.main]

    def branch(self, name: str) -> ScriptedBranch:
        return next(branch for branch in self.branches if branch.name == name)

    def tree(self) -> StateReply:
        branches = [BranchState(branch=b.name, position=3) for b in self.branches]
        return StateReply(session="s", op=1, revision=1, branches=branches)

    def root(self, name: str) -> None:
        self.calls.append(("root", name))
        self.branches.append(ScriptedBranch(self, name))

    def send(self, ops: list[Op]) -> list[Any]:
        self.calls.append(("send", *(plain(op) for op in ops)))
        for op in ops:
            if isinstance(op, Fork):
                self.branches += [ScriptedBranch(self, name) for name in op.as_]
        generates = isinstance(ops[-1], Generate)
        replies: list[Any] = [ScriptedReply() for _ in ops]
        return [*replies[:-1], ScriptedGeneration("main", self.answers.pop(0))] if generates else replies

    def export(self) -> bytes:
        return self.file

    def close(self, *, keep: bool | None = None) -> None:
        self.closed, self.kept = True, keep


def plain(op: Op) -> tuple[Any, ...]:
    match op:
        case Append(branch=branch, messages=list() as messages):
            return ("append", branch, [(message.role, message.content) for message in messages])
        case Fork(branch=branch, as_=names):
            return ("fork", branch, names)
        case Rollback(to=to):
            return ("rollback", to)
    return (type(op).__name__.lower(),)


def turn(
    kind: Any, start: int, end: int, *said: tuple[Any, str], op: int = 1, **fields: Any
) -> SegmentState:
    messages = [ChatMessage(role=role, content=content) for role, content in said] or None
    return SegmentState(kind=kind, start=start, end=end, op=op, messages=messages, **fields)


PROMPT = turn("input", 3, 5, role="assistant", text="<a>")
TOLD = [turn("input", 0, 3, ("user", "hi"), role="user", text="<u>hi</u>"), PROMPT]
ANSWERED = [*TOLD, turn("output", 5, 15, op=2, role="assistant", text="x")]


def talk(
    session: ScriptedSession,
    *lines: Any,
    colour: bool = False,
    renew: Any = None,
    imports: Any = None,
    older: bool = False,
) -> tuple[str, str, list[str]]:
    """What was written to `out` and `notes`, and the prompts."""
    script, prompts = list(lines), []

    def read(prompt: str) -> str | None:
        prompts.append(prompt)
        line = script.pop(0) if script else None
        if isinstance(line, BaseException):
            raise line
        return line

    out, notes = io.StringIO(), io.StringIO()
    first: Any = session
    screen = Screen(out, notes, colour=colour)
    ChatSession(first, read, screen, GenerateOptions(), renew, imports, older=older).run()
    return out.getvalue(), notes.getvalue(), prompts


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
    assert out == "fine\n"


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
    assert "KV of 0 tokens; the session lives 10 min without clients; not saved" in notes
    assert "there is no branch 'none'; there are main, alt" in notes
    assert "use /fork NAME" in notes


def test_undo_and_retry() -> None:
    session = ScriptedSession(["x"], ["again"], ["third"])
    out, notes, _ = talk(session, "/retry")
    assert "there is no message to answer" in notes
    session.turns = ANSWERED
    out, notes, _ = talk(session, "hi", "/retry", "/undo", "/retry")
    assert out == "x\nagain\nthird\n"
    for kept in ("main-1", "main-2"):  # an answer that is asked for again stays, on a branch of its own
        assert ("send", ("fork", "main", [kept]), ("rollback", 5), ("generate",)) in session.calls
        assert f"the answer before is on {kept}: /switch {kept}" in notes
    assert ("rollback", "main", {"turns": 1}) in session.calls
    assert "back at token 3" in notes


def test_continue() -> None:
    """What was set since does not count: the server knows what the answer has to be."""
    session = ScriptedSession(["x"], ["y"])
    session.turns = ANSWERED
    _, notes, _ = talk(session, "/continue")
    assert "no answer was cut here" in notes
    session.reason = "length"
    lines = ("/set temperature 0.5", "/set regex [a-z]+", "/continue")
    out, _, _ = talk(session, *lines)
    assert out == "x\n"
    assert session.calls[-1] == ("generate", "main", {"temperature": 0.5})


def test_pictures(tmp_path: Path) -> None:
    """By command and dropped; named in what is shown; gone with the message, or with its refusal."""
    paths = [tmp_path / "a b.png", tmp_path / "c.JPG"]
    for path in paths:
        path.write_bytes(b"GIF89a...")
    (text := tmp_path / "README.md").write_text("# No picture")
    refusal = "the picture is damaged - at `images[0]`: leave `images` out"
    session = ScriptedSession(["x"], [BadRequest(refusal)], ["y"])
    lines = (
        f"/image '{paths[0]}'", f"{paths[1]} file://{str(paths[0]).replace(' ', '%20')}", "What?",
        "/image",
        f"/image {tmp_path}/none.png", f"/image {tmp_path}", f"/image {text}",
        f"{paths[1]}", "And?", "So?",
    )  # fmt: skip
    _, notes, _ = talk(session, *lines)
    assert notes.count("[picture: a b.png] goes with the next message (9 bytes)") == 2
    assert f"{tmp_path}/none.png: No such file" in notes
    assert f"{tmp_path}: Is a directory" in notes
    assert "the name is missing: use /image FILE" in notes
    assert f"{text} is no picture: PNG, JPEG, WebP and GIF are shown" in notes
    assert "the picture is damaged - at c.JPG: leave `/image` out" in notes
    calls = [(text, len(options.get("images", ()))) for _, _, text, options in session.calls]
    assert calls == [("What?", 3), ("And?", 1), ("So?", 0)]


def test_what_retry_rolls_back_to() -> None:
    def ops(*turns: SegmentState) -> list[Any]:
        return [plain(op) for op in before_answer("main", turns)]

    assert ops(*TOLD) == []  # cancelled before its first token, or loaded
    assert ops(*ANSWERED) == [("rollback", 5)]
    went_on = turn("output", 15, 20, op=3, role="assistant", text="y")
    mouth = turn("input", 20, 22, op=4, role="assistant", text="So")
    assert ops(*ANSWERED, went_on, mouth) == [("rollback", 5)]
    appended = turn("input", 0, 9, ("user", "hi"), ("assistant", "x"), role="assistant", text="...")
    assert ops(appended) == [("rollback", 0), ("append", "main", [("user", "hi")])]
    for nothing in ([], [turn("input", 0, 2, ("system", "s"))], [turn("input", 0, 2, text="raw")]):
        with pytest.raises(BadRequest, match="no message to answer"):
            ops(*nothing)


def test_set_system_help() -> None:
    session = ScriptedSession(["x"])
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
        "/help",
        "/nope",
    )
    assert session.calls[0] == ("chat", "main", "hi", {"temperature": 0})
    assert "all defaults" in notes
    assert '{"temperature": 0}' in notes
    assert "max_tokens is many: must be a whole number from" in notes
    assert ("rollback", "main", {"to": 0}) in session.calls
    assert ("send", ("append", "main", [("system", "be brief")])) in session.calls
    assert "/system TEXT" in notes
    assert "/switch NAME" in notes
    assert "/nope is no command" in notes


def test_set_shows_a_constraint() -> None:
    _, notes, _ = talk(ScriptedSession(["x"]), "/set regex [0-9]{3}", "/set", "/set regex", "/set")
    assert '{"constraint": {"regex": "[0-9]{3}"}}' in notes
    assert "all defaults" in notes.splitlines()[-1]


def test_save_and_load(tmp_path: Path) -> None:
    file = tmp_path / "a b.json"
    session = ScriptedSession(turns=ANSWERED)
    _, notes, _ = talk(
        session,
        f"/save '{file}'",
        f"/save {file}",
        "/save",
        "/save 'x",
        f"/save {tmp_path}",
        f"/load '{file}'",
        "/load /no/file",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a b.json"]
    assert f"2 messages in {file}" in notes
    assert f"use /save FILE; a name with spaces goes in quotes: '{file}'" in notes
    assert "No closing quotation" in notes
    assert "cannot save" in notes
    assert "cannot load" in notes
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]
    assert json.loads(file.read_text()) == {"model": "m", "branch": "main", "messages": said}
    assert ("send", ("append", "main", [("user", "hi"), ("assistant", "x")])) in session.calls
    raw = ScriptedSession(turns=[turn("input", 0, 3, text="raw")])
    _, notes, _ = talk(raw, f"/save {tmp_path}/raw.json")
    assert "text that is no message" in notes


def test_save_and_load_a_whole_session(tmp_path: Path) -> None:
    file = tmp_path / "chat.session"
    session, other = ScriptedSession(turns=ANSWERED), ScriptedSession(["x"], turns=ANSWERED)
    session.file = b"all of it"
    told: list[bytes] = []

    def imports(data: bytes) -> ScriptedSession:
        told.append(data)
        return other

    lines = [
        f"/save {file}",
        f"/save {tmp_path}/no/x.session",
        "/load /no.session",
        f"/load {file}",
        "on",
    ]
    _, notes, _ = talk(session, *lines, imports=imports)
    assert file.read_bytes() == b"all of it"
    assert told == [b"all of it"]
    assert f"the session is in {file}; branches: 1" in notes
    assert notes.count("No such file") == 2
    assert f"branches of {file}: main; you are on main" in notes
    assert (session.closed, session.kept) == (True, None)
    assert other.calls[-1] == ("chat", "main", "on", {})
    _, notes, _ = talk(session, f"/load {file}")
    assert "cannot be loaded here" in notes


@pytest.mark.parametrize(("older", "kept"), [(False, False), (True, None)])
def test_a_session_that_nobody_used_is_not_left_behind(
    older: bool, kept: bool | None, tmp_path: Path
) -> None:
    file = tmp_path / "chat.session"
    file.write_bytes(b"all of it")
    session, other = ScriptedSession(), ScriptedSession(turns=ANSWERED)
    session.main.position = 0
    talk(session, f"/load {file}", imports=lambda _: other, older=older)
    assert (session.closed, session.kept) == (True, kept)


def test_a_pasted_message_is_one() -> None:
    session = ScriptedSession(["x"], ["x"], ["x"])
    _, notes, _ = talk(session, "one\ntwo\\", "/usr/bin\n/bin", "/fork\nx", "/nope")
    assert [call[2] for call in session.calls] == ["one\ntwo\\", "/usr/bin\n/bin", "/fork\nx"]
    assert "/nope is no command" in notes


def test_quotes() -> None:
    session = ScriptedSession(*[["x"]] * 4)
    _, _, prompts = talk(
        session,
        *('"""', "a", "", '/b"""'),
        '"""/tree"""',
        *('"""first', "second", '"""'),
        *('"""never mind', KeyboardInterrupt(), "c"),
        *('"""', '"""'),
    )
    assert [call[2] for call in session.calls] == ["a\n\n/b", "/tree", "first\nsecond", "c"]
    assert prompts[:5] == ["> ", "... ", "... ", "... ", "> "]


def lost(session: ScriptedSession, *steps: Any) -> list[Any]:
    """An answer in the midst of which the server loses the session."""

    class Loses(SessionLost):
        def __init__(self) -> None:
            super().__init__("gone")
            session.error = self

    class Steps(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from steps
            raise Loses

    return Steps()


def test_a_lost_session_is_taken_up_in_a_new_one() -> None:
    old, new = ScriptedSession(["x"]), ScriptedSession(["y"], ["z"])
    old.answers.append(lost(old, "ha"))
    out, notes, _ = talk(old, "hi", "/fork alt", "/switch alt", "more", "last", renew=lambda: new)
    assert new.calls == [
        ("send", ("append", "main", [("user", "hi"), ("assistant", "x")])),
        ("root", "alt"),
        ("send", ("append", "alt", [("user", "hi"), ("assistant", "x")])),
        ("chat", "alt", "more", {}),
        ("chat", "alt", "last", {}),
    ]
    assert out == "x\nha\ny\nz\n"
    assert "goes on in a new session" in notes
    assert old.closed


def test_a_session_that_is_lost_again_and_again_is_an_error() -> None:
    made: list[ScriptedSession] = []

    def renew() -> ScriptedSession:
        session = ScriptedSession()
        session.answers.append(lost(session))
        made.append(session)
        return session

    first = ScriptedSession()
    first.answers.append(lost(first))
    _, notes, _ = talk(first, "hi", renew=renew)
    assert len(made) == RENEWALS - 1
    assert "again and again" in notes


def test_ctrl_c_without_a_connection_returns_to_the_prompt() -> None:
    session = ScriptedSession(["ha", KeyboardInterrupt()])
    session.connected = False
    new = ScriptedSession(["y"])
    talking = iter(["one", "two"])

    def read(_: str) -> str | None:
        line = next(talking, None)
        if line == "two":
            session.error = SessionLost("gone")
        return line

    first: Any = session
    renewed: Any = new
    notes = io.StringIO()
    screen = Screen(io.StringIO(), notes, colour=False)
    ChatSession(first, read, screen, GenerateOptions(), lambda: renewed).run()
    assert "Ctrl-C returns to the prompt" in notes.getvalue()
    assert "stopped" in notes.getvalue()
    assert new.calls == [
        ("send", ("append", "main", [("user", "one"), ("assistant", "ha")])),
        ("chat", "main", "two", {}),
    ]


def test_an_older_session_is_asked_what_was_said() -> None:
    session, new = ScriptedSession(turns=ANSWERED), ScriptedSession(["y"])
    first, renewed = cast(Any, session), cast(Any, new)
    script = ["more"]
    screen = Screen(io.StringIO(), io.StringIO(), colour=False)
    talk = ChatSession(
        first, lambda _: script.pop() if script else None, screen, GenerateOptions(), lambda: renewed
    )
    talk.learn()
    session.error = SessionLost("gone")
    talk.run()
    assert new.calls[0] == ("send", ("append", "main", [("user", "hi"), ("assistant", "x")]))


def test_options() -> None:
    options = GenerateOptions()
    set_option(options, "temperature", "0.5")
    set_option(options, "stop", '["a"]')
    assert options == {"temperature": 0.5, "stop": ["a"]}
    set_option(options, "stop", "")
    assert options == {"temperature": 0.5}
    with pytest.raises(BadRequest, match=r"no generation option: the usual ones are max_tokens"):
        set_option(options, "heat", "1")
    with pytest.raises(BadRequest, match="did you mean temperature"):
        set_option(options, "temprature", "1")
    with pytest.raises(BadRequest, match="temperature is -1: must be a number from 0 to 100"):
        set_option(options, "temperature", "-1")
    set_option(options, "choices", '["yes", "no"]')
    assert options["constraint"] == Constraint(choices=["yes", "no"])
    set_option(options, "regex", "[0-9]+")
    assert options["constraint"] == Constraint(regex="[0-9]+")
    set_option(options, "after_thought", "true")
    assert options["constraint"] == Constraint(regex="[0-9]+", after_thought=True)
    set_option(options, "structural_tag", '{"tags": [{"begin": "<a>", "regex": "b"}]}')
    tags = StructuralTag(tags=[Tag(begin="<a>", regex="b")])
    assert options["constraint"] == Constraint(structural_tag=tags)
    set_option(options, "regex", "")
    assert "constraint" not in options
    for value in ("true", "maybe"):
        with pytest.raises(BadRequest, match="after_thought"):
            set_option(options, "after_thought", value)
    with pytest.raises(BadRequest, match=r"json_schema is \{: must be a JSON Schema"):
        set_option(options, "json_schema", "{")
    with pytest.raises(BadRequest, match="choices"):
        set_option(options, "choices", "[]")


def test_describe() -> None:
    result = Result(branch="main", text="", reason="length", usage=USAGE, position=1)
    assert describe(result).endswith("cached, length")
    assert "guessed" not in describe(result)
    used = msgspec.structs.replace(result.usage, accepted=3)
    guessed = Result(branch="b", text="", reason="stop", usage=used, position=1)
    assert ", 3 guessed, " in describe(guessed)
    used = msgspec.structs.replace(used, forced=4)
    constrained = Result(branch="b", text="", reason="stop", usage=used, position=1)
    assert ", 4 forced, " in describe(constrained)
    assert ", 4 forced, 3 guessed, " in describe(constrained)
    one = usage()
    assert decode_rate(one) is None
    assert "tok/s" not in describe(Result(branch="b", text="", reason="stop", usage=one, position=1))


def test_what_the_server_has_and_for_how_long() -> None:
    branches = [
        BranchState(branch="main", position=9, resident=9, retain_s=300.0),
        BranchState(branch="a", position=12, parent="main", at=9, resident=12),
        BranchState(branch="b", position=13, parent="gone", at=12, resident=4),
        BranchState(branch="c", position=13),
    ]
    assert draw_tree(branches, "a").splitlines()[0] == "  main: 9 tokens, 9 with KV, kept warm for 5 min"
    assert holding(branches, 600.0, "lazy").split("; ") == [
        "on the server: KV of up to 16 tokens",
        "the session lives 10 min without clients",
        "saved soon after each change",
    ]
    assert holding([], None, None).endswith("KV of 0 tokens; not saved: a restart of the server ends it")
    spans = [1.5, 90, 120, 3600, 21_600, 86_400, 2_592_000]
    shown = ["1.5 s", "90 s", "2 min", "1 h", "6 h", "1 d", "30 d"]
    assert [duration(span) for span in spans] == shown


def test_tree() -> None:
    branches = [
        BranchState(branch="main", position=9),
        BranchState(branch="a", position=12, parent="main", at=9, running=3),
        BranchState(branch="b", position=13, parent="a", at=12),
        BranchState(branch="orphan", position=1, parent="dropped", at=1),
    ]
    assert draw_tree(branches, "a").splitlines() == [
        "  main: 9 tokens",
        "*   a: 12 tokens, forked at 9, generating",
        "      b: 13 tokens, forked at 12",
        "  orphan: 1 tokens, forked at 1",
    ]
