"""Structured logs on the standard library: a message and fields, as JSON lines or for humans.

    log = get_log(__name__)
    log.info("listening", host="127.0.0.1", port=8765)

`configure` touches the logger "ramify" only, never the root logger: a program that embeds the
engine keeps its own logging. What is not configured behaves like any library's logger.
"""

import json
import logging
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO

from ramify.protocol.config import LogConfig

ROOT = "ramify"
_FIELDS = "ramify_fields"  # the attribute of a LogRecord
_PASS = ("exc_info", "stack_info", "stacklevel")  # keywords that belong to logging itself


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose keyword arguments are fields of the record.

    Any name but those of `logging`'s own arguments: `msg`, `level`, `exc_info`, `stack_info`,
    `stacklevel`, `extra`.
    """

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        passed = {name: kwargs.pop(name) for name in _PASS if name in kwargs}
        extra = kwargs.pop("extra", None) or {}
        fields = {**(self.extra or {}), **kwargs}
        return msg, {**passed, "extra": {**extra, _FIELDS: fields}}

    def bind(self, **fields: object) -> "Log":
        """A log that adds `fields` to every record."""
        return Log(self.logger, {**(self.extra or {}), **fields})


def get_log(name: str, **fields: object) -> Log:
    """The log of a module (`__name__`), with fields that every record carries."""
    return Log(logging.getLogger(name), fields)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, fields, exception.

    A field never overwrites one of the named keys: it is then called "field_<name>".
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat("T", "milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        for name, value in getattr(record, _FIELDS, {}).items():
            entry[f"field_{name}" if name in entry else name] = value
        try:
            return json.dumps(entry, default=_text, ensure_ascii=False, allow_nan=False)
        except ValueError:  # an infinity or a circle somewhere: JSON has neither
            plain = {
                key: value if isinstance(value, str) else _text(value) for key, value in entry.items()
            }
            return json.dumps(plain, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """`03:05:12.123 INFO    gateway.actor: listening host=127.0.0.1 port=8765`, local time.

    Control characters are escaped: text that a client sent cannot fake a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix(f"{ROOT}.").removeprefix("actors.")
        parts = [f"{when} {record.levelname:<7} {name}: {_printable(record.getMessage())}"]
        fields = getattr(record, _FIELDS, {})
        parts += [f"{key}={_value(value)}" for key, value in fields.items()]
        line = " ".join(parts)
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _text(value: object) -> str:
    """Any object, even one whose `str` fails: a log line must not."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _printable(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


def configure(config: LogConfig, stream: TextIO | None = None) -> logging.Handler:
    """Send records of the engine's loggers to `stream` (standard error).

    Replaces what an earlier call configured. Returns the handler; `unconfigure` takes it away.
    """
    unconfigure()
    handler = _Handler(stream if stream is not None else sys.stderr, config)
    handler.setFormatter(JsonFormatter() if config.format == "json" else HumanFormatter())
    logger = logging.getLogger(ROOT)
    logger.addHandler(handler)
    logger.setLevel(config.level.upper())
    logger.propagate = False
    return handler


def unconfigure() -> None:
    """Undo `configure`."""
    logger = logging.getLogger(ROOT)
    for handler in [h for h in logger.handlers if isinstance(h, _Handler)]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def configured() -> LogConfig | None:
    """The config of the last `configure`, so that a process we start can log alike."""
    for handler in logging.getLogger(ROOT).handlers:
        if isinstance(handler, _Handler):
            return handler.config
    return None


def mark(**fields: object) -> None:
    """Add `fields` to every record that this process writes."""

    def add(record: logging.LogRecord) -> bool:
        setattr(record, _FIELDS, {**getattr(record, _FIELDS, {}), **fields})
        return True

    for handler in logging.getLogger(ROOT).handlers:
        handler.addFilter(add)


class _Handler(logging.StreamHandler[TextIO]):
    """Marks the handler as ours."""

    def __init__(self, stream: TextIO, config: LogConfig) -> None:
        super().__init__(stream)
        self.config = config
