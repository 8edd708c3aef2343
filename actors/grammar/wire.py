"""The messages between the engine and a compile worker, and their codecs.

    engine                   worker
                    <------  Waiting, once it has started
    Job(spec)       ------>
                    <------  Done or Failed

A worker has one job at a time. This file does not know sockets or processes.
"""

import msgspec

from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec
from ramify.protocol.errors import ConstraintError

MAX_FRAME = 1 << 26
TOO_MUCH = 4  # exit code of a worker whose job took too much memory


class Job(msgspec.Struct, array_like=True):
    """Compile `spec`."""

    spec: ConstraintSpec


class Waiting(msgspec.Struct, array_like=True, tag="w"):
    """The worker can take a job."""


class Done(msgspec.Struct, array_like=True, tag="d"):
    """The job's result."""

    compiled: CompiledConstraint


class Failed(msgspec.Struct, array_like=True, tag="f"):
    """The constraint cannot be compiled."""

    message: str
    pointer: str | None
    position: int | None

    @staticmethod
    def of(error: ConstraintError) -> "Failed":
        details = error.details or {}
        return Failed(error.message, details.get("pointer"), details.get("position"))

    def exception(self) -> ConstraintError:
        return ConstraintError(self.message, pointer=self.pointer, position=self.position)


FromWorker = Waiting | Done | Failed


def to_worker() -> "msgspec.msgpack.Decoder[Job]":
    """What a worker reads with."""
    return msgspec.msgpack.Decoder(Job)


def from_worker() -> "msgspec.msgpack.Decoder[FromWorker]":
    """What the engine reads with."""
    return msgspec.msgpack.Decoder(FromWorker)


def encoder() -> msgspec.msgpack.Encoder:
    """For both directions."""
    return msgspec.msgpack.Encoder()
