"""What every process of an engine says of its start and its metrics, and the codecs of all links.

    parent                      process
                      <-------  Loading ... Loading
                      <-------  its own sign that it is ready, or StartFailed and the end
    AskMetrics        <------>  MetricsText

This file does not know sockets or processes.
"""

from pathlib import Path
from typing import Any

import msgspec

from ramify.protocol.errors import ConfigError, ModelError, RamifyError


class NotStarted(RamifyError):
    """A process did not start, for a reason that is not the user's to mend."""


class ProcessMessage(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of what processes tell each other: positional on the wire, tagged with the class name."""


class Loading(ProcessMessage, frozen=True):
    """How far the start is: `done` of 1.0."""

    what: str
    done: float


class StartFailed(ProcessMessage, frozen=True):
    """The process cannot start, and ends. `kind` names the exception's class."""

    kind: str
    message: str
    details: dict[str, Any] | None = None

    @classmethod
    def of(cls, error: BaseException) -> "StartFailed":
        if isinstance(error, RamifyError):
            return cls(type(error).__name__, error.message, error.details)
        return cls(type(error).__name__, str(error))

    def exception(self, what: str) -> RamifyError:
        """The exception to raise where the process was started; `what` it is."""
        for kind in (ModelError, ConfigError, NotStarted):
            if self.kind == kind.__name__:
                return kind(self.message, details=self.details)
        return NotStarted(f"{what} did not start: {self.kind}: {self.message}")


class AskMetrics(ProcessMessage, frozen=True):
    """A client scrapes `/metrics`: the other side is to say its own."""

    id: int


class MetricsText(ProcessMessage, frozen=True):
    """The answer to `AskMetrics`."""

    id: int
    text: bytes


def encoder() -> msgspec.msgpack.Encoder:
    """For all links."""
    return msgspec.msgpack.Encoder(enc_hook=_encode_path)


def decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    """For a link on which messages of this type (a union, mostly) arrive."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_path)


# Paths, which settings hold, travel as text. msgspec asks about what it does not know itself, and wants
# NotImplementedError for the rest.


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no encoding for {type(value).__name__}")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no decoding for {kind.__name__}")
