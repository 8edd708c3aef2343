"""Hints are commands that work where they are read."""

import sys
from pathlib import Path

import pytest

from ramify.clients.commands.invocation import command


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "my env" / "bin" / "ramify"
    file.parent.mkdir(parents=True)
    file.write_text("")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", [str(file), "serve"])
    return file


def test_an_environment_that_is_not_active(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("chat", "--key", "a b") == "'my env/bin/ramify' chat --key 'a b'"
    monkeypatch.chdir("/")
    assert command("info") == f"'{script}' info" if tmp_path.parent == Path("/") else command("info")
    monkeypatch.setattr(sys, "argv", ["my env/bin/ramify"])
    monkeypatch.chdir(tmp_path)
    assert command() == "'my env/bin/ramify'"


def test_on_the_path(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    assert command("chat") == "ramify chat"
    other = script.parent / "other" / "ramify"
    other.parent.mkdir()
    other.write_text("")
    monkeypatch.setattr(sys, "argv", [str(other)])
    monkeypatch.chdir(other.parent.parent)
    assert command("chat") == "other/ramify chat"  # another one than the path's


def test_as_a_module_or_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/ramify/__main__.py"])
    assert command("chat").endswith(" -m ramify chat")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert command("chat") == "ramify chat"
