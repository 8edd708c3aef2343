"""The driver's side of a load: sessions that hold lines. Interfaces only."""

from collections.abc import Sequence
from typing import Any, Protocol

from ramify.clients.bench.load_program import GenerateJob, Trace
from ramify.protocol.errors import RamifyError


class BenchFailed(RamifyError):
    """The server did not do what was asked: nothing that was measured may be trusted."""


class BenchBranch(Protocol):
    """A sequence of tokens that grows at its end."""

    async def append(self, tokens: Sequence[int]) -> None:
        """Add input ahead of a generation. Raises BenchFailed where a server cannot."""
        ...

    async def say(self, job: GenerateJob, *, more: bool) -> Trace:
        """Append and generate. `more`: another job follows on this line.

        Raises BenchFailed unless exactly `job.output` tokens came and one end.
        """
        ...

    async def spread(
        self, prefix: Sequence[int], jobs: Sequence[GenerateJob], *, more: bool
    ) -> "list[tuple[BenchBranch, Trace]]":
        """Append `prefix`, fork a line for each job, and run all jobs at once."""
        ...


class BenchSession(Protocol):
    """One user of the server. `extras`: traces of requests that the load did not ask for."""

    root: BenchBranch
    extras: list[Trace]

    async def close(self) -> None:
        """End the session, and check that no unexpected message came."""
        ...


class Driver(Protocol):
    """Knows how to talk to one server."""

    async def session(self, width: int) -> BenchSession:
        """Connect everything that `width` generations at once need."""
        ...


def check_output(trace: Trace, job: GenerateJob, where: str) -> None:
    """Raises BenchFailed unless all tokens of `job` came."""
    if trace.output != job.output:
        raise BenchFailed(f"{where}: {trace.output} tokens came of {job.output} that were asked for")


def seen(facts: Any) -> str:
    """Shorten a server's answer for an error message."""
    text = facts.decode("utf-8", "replace") if isinstance(facts, bytes) else str(facts)
    return " ".join(text.split())[:300]
