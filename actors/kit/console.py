"""A process whose output is JSON lines, whoever writes: loggers, warnings, `print`, C libraries.

For a process that is ours alone, as `ramify serve --log-format json` and its children are; a program
that embeds the engine keeps its own output. Two parts:

- `own_process` sends all Python logging, warnings and uncaught exceptions through our formatter;
- `Console` puts a pipe in the place of standard output and standard error, and wraps each line that is
  no JSON object: what was printed past all loggers, by us, by libraries, by child processes.
"""

import atexit
import json
import logging
import os
import selectors
import sys
import threading
import warnings
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from ramify.actors.kit.log import configure
from ramify.protocol.config import LogConfig

MOST_BYTES = 1 << 20  # of a line; a longer one is cut into several
PARTING_SECONDS = 2.0  # for what is still in the pipes at the end
_STREAMS = {1: ("stdout", "info"), 2: ("stderr", "warning")}

_log = logging.getLogger("ramify.process")


def own_process(config: LogConfig, stream: TextIO | None = None) -> None:
    """Log all of this process as `config` says; foreign loggers from "warning" on."""
    handler = configure(config, stream)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    warnings.simplefilter("default", append=True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable


def configure_process(config: LogConfig) -> None:
    """Log a child process of the engine. Its output ends in the engine's, which wraps the rest."""
    if config.format == "json":
        own_process(config)
    else:
        configure(config)


def json_console(config: LogConfig) -> None:
    """Make this process, and what it starts, write JSON lines only."""
    console = Console()
    own_process(config, console.error)


def wrapped(line: bytes, logger: str, level: str) -> bytes:
    """A line as JSON: as it is if it is a JSON object, else as the message of a record."""
    if line.startswith(b"{"):
        try:
            if isinstance(json.loads(line), dict):
                return line + b"\n"
        except ValueError:
            pass
    entry = {
        "time": datetime.now(UTC).isoformat("T", "milliseconds"),
        "level": level,
        "logger": logger,
        "message": line.decode("utf-8", "replace"),
    }
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"


class Console:
    """Standard output and error of this process, line by line. One a process, until it ends.

    `error`: the real standard error, for a handler whose lines must not be lost in a pipe.
    """

    def __init__(self) -> None:
        self._real = {fd: os.dup(fd) for fd in _STREAMS}
        self._closed = False
        self._rest = dict.fromkeys(_STREAMS, b"")
        self._selector = selectors.DefaultSelector()
        self.error = _text_to(os.dup(2))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd in _STREAMS:
            reader, writer = os.pipe()
            os.dup2(writer, fd)
            os.close(writer)
            self._selector.register(reader, selectors.EVENT_READ, fd)
        self._was = sys.stdout, sys.stderr  # they know their files' positions: a pipe has none
        sys.stdout, sys.stderr = (_text_to(fd, closefd=False) for fd in _STREAMS)
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Put the real ones back, once all that was written has come out. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd, real in self._real.items():
            os.dup2(real, fd)  # the last writer of the pipe, unless a child has it
        sys.stdout, sys.stderr = self._was
        self._thread.join(PARTING_SECONDS)

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                data = os.read(key.fd, 1 << 16)
                if data:
                    self._feed(key.data, data)
                else:
                    if self._rest[key.data]:
                        self._feed(key.data, b"\n")
                    self._selector.unregister(key.fd)
                    os.close(key.fd)

    def _feed(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        if len(rest) > MOST_BYTES:
            lines.append(rest)
            rest = b""
        self._rest[fd] = rest
        out = b"".join(wrapped(line, *_STREAMS[fd]) for line in lines if line.strip())
        try:
            while out:
                out = out[os.write(self._real[fd], out) :]
        except OSError:  # nobody reads our output any more
            pass


def _text_to(fd: int, *, closefd: bool = True) -> TextIO:
    """A text stream to `fd`. What cannot be encoded is escaped as in JSON."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=closefd)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log.critical("an uncaught exception ends the process", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: Any) -> None:
    name = args.thread.name if args.thread is not None else "?"
    if args.exc_type is not SystemExit:
        info = (args.exc_type, args.exc_value, args.exc_traceback)
        _log.critical("an uncaught exception ends thread %s", name, exc_info=info)


def _unraisable(args: Any) -> None:
    info = (args.exc_type, args.exc_value, args.exc_traceback)
    _log.error("%s: %r", args.err_msg or "exception ignored in", args.object, exc_info=info)
