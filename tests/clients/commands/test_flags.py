"""Flags are made from declarations: a setting that is added to a class is a flag, help and a value."""

import argparse
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest

from ramify.clients.cli import build_parser
from ramify.clients.commands.flags import add_flags, given, or_variable, with_settings
from ramify.clients.commands.settings import SERVER
from ramify.protocol.settings import Setting, Settings, declared


class Some(Settings, frozen=True, kw_only=True):
    """Of every kind."""

    GROUP: ClassVar[str] = "server"

    path: Annotated[Path, Setting("a file; of some kind", first=True, default="the usual one")]
    count: Annotated[int | None, Setting("how many", low=1, default="all")] = None
    wait_s: Annotated[float, Setting("to wait", low=0, high=9, unit="seconds")] = 1.5
    fast: Annotated[bool, Setting("do it fast")] = False
    sure: Annotated[bool, Setting("do not ask", flag="--not-sure")] = True
    kind: Annotated[Literal["a", "b"], Setting("which", group="log")] = "a"
    names: Annotated[tuple[str, ...], Setting("a name", flag="--name")] = ()
    fill: Annotated[int | None, Setting("tokens", words={"auto": None, "none": 0}, default="auto")] = (
        None
    )
    token: Annotated[str | None, Setting("secret", flag=None, environment="T_TOKEN")] = None
    room: Annotated[int, Setting("memory", high=1 << 40, unit="bytes")] = 0
    place: Annotated[
        str | None,
        Setting("where", words={"none": None}, default="auto", environment="T_PLACE"),
    ] = None


def fill(parser: argparse.ArgumentParser, every: bool) -> None:
    add_flags(parser, [Some], every=every)


def read(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(prog="x")
    with_settings(parser, fill)
    return given(Some, parser.parse_args(words))


def test_without_flags_it_is_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("T_TOKEN", raising=False)
    assert read() == {
        "path": None, "count": None, "wait_s": 1.5, "fast": False, "sure": True, "kind": "a",
        "names": (), "fill": None, "token": None, "room": 0, "place": "auto",
    }  # fmt: skip


@pytest.mark.parametrize(("text", "room"), [("64", 64), ("-1", -1), ("64M", 64 << 20), ("2T", 2 << 40)])
def test_bytes_have_units(text: str, room: int) -> None:
    assert read("--room", text)["room"] == room  # bounds are the declaration's, behind


@pytest.mark.parametrize("text", ["64X", "M", "1.5G", "64MB", "9" * 19])
def test_what_is_no_number_of_bytes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--room", text)
    assert "must be a number of bytes, or one with K, M, G or T" in capsys.readouterr().err


def test_flags_are_read_by_type() -> None:
    found = read(
        *("--path", "f", "--count", "3", "--wait", "2", "--fast", "--not-sure", "--kind", "b"),
        *("--name", "x", "--name", "y", "--fill", "none", "--place", "none", "--room", "3K"),
    )
    assert found | {"token": None} == {
        "path": Path("f"), "count": 3, "wait_s": 2.0, "fast": True, "sure": False, "kind": "b",
        "names": ("x", "y"), "fill": 0, "token": None, "room": 3072, "place": None,
    }  # fmt: skip
    assert read("--fill", "7")["fill"] == 7
    assert read("--fill", "auto")["fill"] is None


@pytest.mark.parametrize("words", [["--count", "x"], ["--kind", "c"], ["--fill", "some"]])
def test_what_is_no_such_value(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(*words)
    assert words[0] in capsys.readouterr().err


def test_variables_stand_in_for_flags_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T_TOKEN", "secret")
    monkeypatch.setenv("T_PLACE", "there")
    assert (read()["token"], read()["place"]) == ("secret", "there")
    assert read("--place", "here")["place"] == "here"
    assert read("--place", "none")["place"] is None
    monkeypatch.setenv("T_PLACE", "none")
    assert read()["place"] is None
    monkeypatch.setenv("T_PLACE", "")
    monkeypatch.setenv("T_TOKEN", "")
    assert (read()["token"], read()["place"]) == ("", "auto")  # an empty token is refused later
    (place,) = (each for each in declared(Some) if each.field == "place")
    assert or_variable(place, "auto") == "auto"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(words)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_is_for_newcomers_and_fits_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, "serve", "--help")
    first = [each for kind in SERVER for each in declared(kind) if each.setting.first]
    assert len(first) == 10
    lines = text.splitlines()
    assert len(lines) <= 40
    assert {line.split()[0] for line in lines if line.startswith("  --")} == {
        *(each.flag for each in first),
        "--help-all",
    }


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_help_all_shows_every_flag_with_all_that_is_said(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    text = shown(capsys, command, "--help-all")
    for each in (each for kind in SERVER for each in declared(kind)):
        if each.flag is not None and (command == "serve" or each.group == "model"):
            assert f"\n  {each.flag} " in text or f"\n  {each.flag}\n" in text
            assert each.setting.help in text


def test_no_two_settings_have_one_flag() -> None:
    flags = [each.flag for kind in SERVER for each in declared(kind) if each.flag is not None]
    assert len(flags) == len(set(flags)) > 100
