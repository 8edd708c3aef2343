"""The prompt, with keys from a pipe: pastes, history, completion."""

import os
import pty
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from ramify.clients.commands import terminal
from ramify.clients.commands.terminal import CommandCompleter, Terminal, open_history


def words(name: str) -> Sequence[str]:
    return {"": ["/fork", "/switch"], "/switch": ["main", "alt"]}.get(name, [])


@contextmanager
def keys(text: str, history: Path) -> Iterator[Terminal]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(text)
        yield Terminal(words, history)


def test_a_paste_is_one_message(tmp_path: Path) -> None:
    with keys("\x1b[200~one\r\ntwo\nthree\x1b[201~!\rnext\r\x04", tmp_path / "h") as opened:
        assert opened.read("> ") == "one\ntwo\nthree!"
        assert opened.read("> ") == "next"
        assert opened.read("> ") is None


def test_ctrl_c_is_raised(tmp_path: Path) -> None:
    with keys("abc\x03", tmp_path / "h") as opened, pytest.raises(KeyboardInterrupt):
        opened.read("> ")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("/sw", ["/switch"]),
        ("/", ["/fork", "/switch"]),
        ("/switch ", ["main", "alt"]),
        ("/switch a", ["alt"]),
        ("/fork x", []),
        ("hi", []),
        ("/load FOLDER/ta", ["lk.json"]),
    ],
)
def test_completion(typed: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text("")
    text = typed.replace("FOLDER", str(tmp_path))
    found = CommandCompleter(words).get_completions(Document(text, len(text)), CompleteEvent())
    assert [completion.text for completion in found] == offered


def test_history_is_kept_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state" / "messages"
    monkeypatch.setattr(terminal, "HISTORY", 3)
    with keys("a\r\x1b[200~b\nb\x1b[201~\rc\rd\r", file) as opened:
        for _ in range(4):
            opened.read("> ")
    with keys("\x1b[A\x1b[A\r", file) as opened:
        assert opened.read("> ") == "c"
    assert list(open_history(file).load_history_strings()) == ["c", "d", "c"]


def test_history_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert isinstance(open_history(tmp_path / "file" / "below" / "h"), InMemoryHistory)


def test_what_is_typed_during_an_answer_is_not_echoed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, closefd=False) as stdin, keys("x\r", tmp_path / "h") as opened:
            monkeypatch.setattr(sys, "stdin", stdin)
            before = termios.tcgetattr(slave)[3]
            with opened:
                assert not termios.tcgetattr(slave)[3] & termios.ECHO
                opened.read("> ")
                assert capsys.readouterr().out.endswith(terminal.PASTE_ON)
            assert termios.tcgetattr(slave)[3] == before
            assert capsys.readouterr().out.endswith(terminal.PASTE_OFF)
    finally:
        os.close(master)
        os.close(slave)
