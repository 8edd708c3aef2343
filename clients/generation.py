"""What is on its way: `Reply` (an op without text) and `Generation` (an op that brings text).

Views of the client core's tickets and streams; both wait on the link until something changes.
"""

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ramify.clients.errors import Cancelled, Skipped
from ramify.clients.stream import Stream, TextDelta, Ticket
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Cancel, Done, Ok, State, TokenLogprob, Usage

if TYPE_CHECKING:
    from ramify.clients.connect import Link


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that ended. `position`: the branch's length after it, in tokens.

    `tokens`: where the session was opened with `tokens=True`; `logprobs`: where asked for.
    """

    branch: str
    text: str
    reason: Literal["stop", "length", "tool", "cancelled", "deadline", "error"]
    usage: Usage
    position: int
    tokens: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    stop: str | int | None = None
    scores: list[float] | None = None
    mean_logprob: float | None = None


class Reply:
    """An op that is on its way; awaiting it gives its replies, one for each branch it names."""

    def __init__(self, link: "Link", ticket: Ticket) -> None:
        self._link = link
        self._ticket = ticket

    async def _replies(self) -> list[Ok | State]:
        while not self._ticket.settled:
            await self._link.changed(self._ticket)
        if self._ticket.error is not None:
            raise self._ticket.error
        return [reply for reply in self._ticket.replies if not isinstance(reply, Done)]

    def __await__(self) -> Generator[Any, None, list[Ok | State]]:
        return self._replies().__await__()


class Generation:
    """A generation: an async iterator of `TextDelta`s, and awaitable for the `Result`.

    What is not read is merged: memory is that of the text. A task that is cancelled while it waits
    here cancels the generation on the server; leaving an `async for` early does not (use `async
    with`, or `cancel`). A cancelled generation ends with reason "cancelled" and keeps its text.
    """

    def __init__(self, link: "Link", ticket: Ticket, stream: Stream) -> None:
        self._link = link
        self._ticket = ticket
        self._stream = stream

    @property
    def branch(self) -> str:
        """The name of the branch it runs on."""
        return self._stream.branch

    @property
    def text(self) -> str:
        """The text so far."""
        return self._stream.text

    @property
    def ended(self) -> bool:
        return self._stream.settled

    async def progress(self) -> None:
        """Wait until there is more of it."""
        if not self._stream.settled:
            await self._changed()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> TextDelta:
        while True:
            delta = self._stream.take()
            if delta is not None and (delta.text or delta.tokens or delta.cut):
                return delta
            if self._stream.settled:
                self._raise()
                raise StopAsyncIteration
            await self._changed()

    def __await__(self) -> Generator[Any, None, Result]:
        return self._result().__await__()

    async def _result(self) -> Result:
        while not self._stream.settled:
            await self._changed()
        self._raise()
        return result_of(self._stream)

    async def _changed(self) -> None:
        try:
            await self._link.changed(self._ticket)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise(self) -> None:
        error = self._stream.error
        if isinstance(error, Skipped) and isinstance(error.__cause__, RamifyError):
            raise error.__cause__ from error  # what went wrong, not that this was skipped for it
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Ask the server to stop; the generation then ends with what it has. Does not wait."""
        ticket, stream = self._ticket, self._stream
        if stream.settled or self._link.core.error is not None:
            return
        if self._link.withdraw(ticket, Cancelled("the generation was cancelled before it was sent")):
            return
        if len(ticket.streams) > 1:
            self._link.submit([Cancel(id=0, branch=stream.branch)])
        elif ticket.id is not None:
            self._link.submit([Cancel(id=0, ops=[ticket.id])])

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


def result_of(stream: Stream) -> Result:
    """The result of a stream that ended well."""
    done = stream.done
    assert done is not None
    return Result(
        branch=stream.branch,
        text=stream.text,
        reason=done.reason,
        usage=done.usage,
        position=done.position,
        tokens=[token for part in stream.parts for token in part.tokens or ()] or None,
        logprobs=[entry for part in stream.parts for entry in part.logprobs or ()] or None,
        tool_calls=done.tool_calls,
        stop=done.stop,
        scores=done.scores,
        mean_logprob=done.mean_logprob,
    )
