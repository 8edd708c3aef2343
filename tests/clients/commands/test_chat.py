"""`ramify chat` against the model server: a question, a pipe, a script, a terminal."""

import io
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.clients import cli
from ramify.clients.commands import chat
from ramify.clients.commands.screen import Screen
from ramify.clients.errors import ConnectionLost, SessionLost
from ramify.clients.session_link import Connection
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Usage

PATIENCE = 60.0  # seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def asked(server: Any) -> list[str]:
    return ["".join(piece.texts) for piece in server.branches["main"].pieces if piece.op is None]


def test_a_question(url: str, server: Any, piped: Any, capsys: pytest.CaptureFixture[str]) -> None:
    piped("")
    assert cli.main(["chat", "hi!", "--url", url, "--set", "max_tokens=2", "--set", "seed=1"]) == 0
    out, err = capsys.readouterr()
    assert out == "<3:1><4:1>\n"
    assert err == "cut after 2 tokens: --set max_tokens=N allows more\n"
    assert asked(server) == ["hi!"]
    assert server.closes == [False]


def test_an_answer_that_fills_the_context_is_not_cut_by_max_tokens() -> None:
    usage = Usage(
        prompt=1641, cached=0, computed=1641, output=407, forced=0, hit="none",
        queue_ms=0, ttft_ms=1, total_ms=2,
    )  # fmt: skip
    assert chat.cut_note(usage, 407) == "cut after 407 tokens: --set max_tokens=N allows more"
    full = chat.cut_note(usage, 1024)
    assert full == "cut after 407 tokens: with the 1641 before them, the context is full"


def test_a_pipe_is_one_question(url: str, server: Any, piped: Any) -> None:
    piped("one\n/tree\n\nthree\n")
    assert cli.main(["chat", "--url", url, "--set", "max_tokens=1"]) == 0
    assert asked(server) == ["one\n/tree\n\nthree"]


def test_a_question_about_a_pipe(url: str, server: Any, piped: Any) -> None:
    piped("the text\n")
    assert cli.main(["chat", "Sum it up:", "--url", url, "--set", "max_tokens=1"]) == 0
    assert asked(server) == ["Sum it up:\n\nthe text"]


def test_on_a_terminal_a_question_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("never read"))
    assert chat.question("hi") == "hi"


def test_nothing_to_answer(piped: Any, capsys: pytest.CaptureFixture[str]) -> None:
    piped(" \n")
    assert cli.main(["chat", "--url", "ws://127.0.0.1:9"]) == 2
    assert "there is nothing to answer" in capsys.readouterr().err
    with pytest.raises(BadRequest):
        chat.question("")
    assert cli.main(["chat", "hi", "--script"]) == 2


def test_a_question_that_fails(url: str, piped: Any, capsys: pytest.CaptureFixture[str]) -> None:
    piped("")
    assert cli.main(["chat", "hi", "--url", "ws://127.0.0.1:9"]) == 1
    assert cli.main(["chat", "x" * 2_000_000, "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "bytes in a frame" in err


def test_a_script(url: str, server: Any, piped: Any, capsys: pytest.CaptureFixture[str]) -> None:
    piped("one\n/fork a\ntwo\n")
    assert cli.main(["chat", "--script", "--url", url, "--set", "max_tokens=1", "--system", "s"]) == 0
    out, err = capsys.readouterr()
    assert out == "<4:None>\n<8:None>\n"
    assert "a starts at token 5" in err
    assert re.search(r"to go on: \S+ chat --url ws://\S+ --session s_1 --key k_1", err)
    assert asked(server) == ["s", "one", "two"]
    assert server.closes == [True]


def test_a_script_with_a_fault_exits_with_1(url: str, piped: Any) -> None:
    piped("/nope\nhi\n")
    assert cli.main(["chat", "--script", "--url", url, "--set", "max_tokens=1"]) == 1


def test_what_is_told_of_the_connection() -> None:
    notes = io.StringIO()
    screen = Screen(io.StringIO(), notes, colour=False)
    chat.tell(screen, Connection(up=False, error=ConnectionLost("the connection broke")))
    chat.tell(screen, Connection(up=True))
    chat.tell(screen, Connection(up=False, error=SessionLost("gone"), over=True))
    chat.tell(screen, Connection(up=False, error=ConnectionLost("bye"), over=True))  # raised instead
    assert notes.getvalue().splitlines() == [
        "the server is gone (the connection broke); trying again",
        "connected again",
        "the server no longer knows this session",
    ]


def test_a_server_that_is_away_is_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, tried = io.StringIO(), []
    screen = Screen(io.StringIO(), notes, colour=False)
    real = chat.connect_sync

    def connect(address: str, **settings: Any) -> Any:
        tried.append(address)
        return real(address if len(tried) > 2 else "ws://127.0.0.1:9", **settings)

    monkeypatch.setattr(chat, "connect_sync", connect)
    monkeypatch.setattr(chat, "RETRY_S", 0.0)
    chat._attach(url, {}, screen).close()
    assert len(tried) == 3
    assert notes.getvalue().count("trying again") == 1
    tried.clear()
    with pytest.raises(ConnectionLost):
        chat._attach(url, {"give_up_s": 0.0}, screen)
    assert len(tried) == 1


class Pty:
    """A terminal that runs `ramify chat`."""

    def __init__(self, *args: str, state: Path) -> None:
        self.master, slave = pty.openpty()
        environment = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "xterm", "COLUMNS": "80"}
        command = [sys.executable, "-m", "ramify.clients.cli", "chat", *args]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def expect(self, pattern: str) -> None:
        """Read until the pattern comes, after what was expected before."""
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self.master], [], [], PATIENCE)
            assert ready, f"{pattern!r} did not come: {self.seen!r}"
            data = os.read(self.master, 65536).decode("utf-8", "replace")
            if "\x1b[6n" in data:  # where is the cursor?
                self.type("\x1b[1;1R")
            self.seen += data
        self.seen = self.seen[found.end() :]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def __enter__(self) -> "Pty":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_a_talk_on_a_terminal(url: str, server: Any, tmp_path: Path) -> None:
    """A paste of several lines is one message, also one that comes during an answer."""
    with Pty("--url", url, "--set", "max_tokens=3", state=tmp_path) as terminal:
        terminal.expect("Ctrl-D leaves")
        terminal.expect(">")
        terminal.type("\x1b[200~one\ntwo\x1b[201~")
        terminal.expect("two")
        terminal.type("\r")
        terminal.expect("3 tokens")
        terminal.type("\x1b[200~three\nfour\x1b[201~\r")
        terminal.expect("3 tokens")
        terminal.type('"""\ra\r\rb"""\r')
        terminal.expect("3 tokens")
        terminal.type("\x04")
        terminal.expect("to go on: ")
        assert terminal.process.wait(PATIENCE) == 0
    assert asked(server) == ["one\ntwo", "three\nfour", "a\n\nb"]


def test_a_text_that_is_too_long_loses_its_middle() -> None:
    text = "".join(map(str, range(1000)))
    once = chat.shorter(text)
    assert len(once) < 0.8 * len(text)
    assert (once[:100], once[-100:]) == (text[:100], text[-100:])
    again = chat.shorter(once)
    assert again.count(chat.CUT_MARK) == 1
    assert (again[:100], again[-100:]) == (text[:100], text[-100:])


def test_the_server_that_runs_on_the_default_port_is_talked_to(
    url: str, piped: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "server_at", lambda *_: (url, {"model": {"model": "small"}}))
    piped("")
    assert cli.main(["chat", "Hello."]) == 0
    assert f"talking to the server at {url} (small); --own starts one" in capsys.readouterr().err
