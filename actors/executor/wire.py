"""The messages between an executor's process and its starter, and their codecs.

    starter                     process
    Start(spec, log)  ------->
                      <-------  Loading ... Loading
                      <-------  ExecutorInfo, or LoadFailed and the end
                      <-------  Waiting, every second without a plan
    StepPlan          ------->
                      <-------  StepResult, or ExecutorDown and the end
    StopExecutor      ------->  finishes what it has, ends with exit code 0

This file does not know sockets or processes.
"""

from typing import Any

import msgspec

from ramify.actors.executor.spec import ExecutorNotStarted, ExecutorSpec
from ramify.actors.kit.log import LogConfig
from ramify.actors.kit.paths import decode_path, encode_path
from ramify.protocol.errors import ConfigError, ModelError, RamifyError
from ramify.protocol.plan import ExecutorDown, ExecutorInfo, StepPlan, StepResult, StopExecutor


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make this executor, log like this."""

    spec: ExecutorSpec
    log: LogConfig | None = None


class Loading(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call of the progress callback."""

    what: str
    done: float


class LoadFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The executor could not be made. `kind` names the exception's class."""

    kind: str
    message: str
    details: dict[str, Any] | None = None

    @classmethod
    def of(cls, error: BaseException) -> "LoadFailed":
        if isinstance(error, RamifyError):
            return cls(type(error).__name__, error.message, error.details)
        return cls(type(error).__name__, str(error))

    def exception(self) -> RamifyError:
        """The exception to raise where the executor was started."""
        for kind in (ModelError, ConfigError, ExecutorNotStarted):
            if self.kind == kind.__name__:
                return kind(self.message, details=self.details)
        return ExecutorNotStarted(f"the executor did not start: {self.kind}: {self.message}")


class Waiting(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A sign of life of a process that has nothing to do."""


ToExecutor = Start | StepPlan | StopExecutor
FromExecutor = Waiting | Loading | LoadFailed | ExecutorInfo | StepResult | ExecutorDown


def encoder() -> msgspec.msgpack.Encoder:
    """For either direction."""
    return msgspec.msgpack.Encoder(enc_hook=encode_path)


def to_executor() -> "msgspec.msgpack.Decoder[ToExecutor]":
    """Decodes what the process receives."""
    return msgspec.msgpack.Decoder(ToExecutor, dec_hook=decode_path)


def from_executor() -> "msgspec.msgpack.Decoder[FromExecutor]":
    """Decodes what the starter receives."""
    return msgspec.msgpack.Decoder(FromExecutor)
