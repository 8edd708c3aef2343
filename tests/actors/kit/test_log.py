"""Structured logs: JSON lines, human lines, and what `configure` touches."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from ramify.actors.kit.log import configure, configured, get_log, unconfigure
from ramify.protocol.config import LogConfig


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    unconfigure()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_fields_and_context() -> None:
    stream = io.StringIO()
    configure(LogConfig(format="json"), stream)
    log = get_log("ramify.actors.session.actor", session=7)
    log.info("opened", branches=2, name="a\nb")
    log.bind(socket=3).warning("slow by %d ms", 12)
    first, second = lines(stream)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "ramify.actors.session.actor",
        "message": "opened",
        "session": 7,
        "branches": 2,
        "name": "a\nb",
    }
    assert (second["message"], second["session"], second["socket"]) == ("slow by 12 ms", 7, 3)


def test_json_keeps_one_line_for_a_traceback_and_any_value() -> None:
    stream = io.StringIO()
    configure(LogConfig(format="json"), stream)
    log = get_log("ramify.x")
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.exception("it broke", where=object, logger="mine", message="also mine")
    (entry,) = lines(stream)
    assert "ValueError: a\nb" in entry["exception"]
    assert (entry["logger"], entry["field_logger"]) == ("ramify.x", "mine")
    assert (entry["message"], entry["field_message"]) == ("it broke", "also mine")
    assert entry["where"] == "<class 'object'>"


def test_human_lines() -> None:
    stream = io.StringIO()
    configure(LogConfig(), stream)
    log = get_log("ramify.actors.gateway.actor")
    log.info("listening", host="127.0.0.1", port=8765, took=0.123456789, empty="", text="two words")
    (line,) = stream.getvalue().splitlines()
    assert line[13:] == (
        "INFO    gateway.actor: listening host=127.0.0.1 port=8765 took=0.123457 "
        'empty="" text="two words"'
    )


def test_client_text_cannot_fake_a_line() -> None:
    stream = io.StringIO()
    configure(LogConfig(), stream)
    get_log("ramify.x").info("name\nERROR fake", client="\x1b[31m\n12:00 ERROR fake é")
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


def test_human_lines_show_tracebacks() -> None:
    stream = io.StringIO()
    configure(LogConfig(), stream)
    try:
        raise ValueError("boom")
    except ValueError as error:
        get_log("ramify.x").error("failed", exc_info=error)
    assert stream.getvalue().rstrip().endswith("ValueError: boom")


def test_level_filters() -> None:
    stream = io.StringIO()
    configure(LogConfig(level="warning", format="json"), stream)
    log = get_log("ramify.x")
    log.info("not this")
    log.warning("this")
    assert [entry["message"] for entry in lines(stream)] == ["this"]


def test_configure_replaces_and_leaves_the_root_logger_alone() -> None:
    root = logging.getLogger().handlers[:]
    one, other = io.StringIO(), io.StringIO()
    configure(LogConfig(), one)
    configure(LogConfig(level="debug"), other)
    assert configured() == LogConfig(level="debug")
    get_log("ramify.x").info("once")
    assert one.getvalue() == ""
    assert other.getvalue().count("once") == 1
    assert logging.getLogger().handlers == root
    unconfigure()
    assert configured() is None
    assert logging.getLogger("ramify").handlers == []
    assert logging.getLogger("ramify").propagate


def test_unconfigured_records_reach_the_program_that_embeds_us(caplog: pytest.LogCaptureFixture) -> None:
    get_log("ramify.x").warning("hello", extra={"other": 1}, n=2)
    (record,) = caplog.records
    assert record.getMessage() == "hello"
    assert record.other == 1
