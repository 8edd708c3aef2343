"""Handles of ops under way: `Reply` (an op without text) and `Generation` (an op that brings text).

They are views of the client core's tickets and streams; both wait on the link until something changes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, TypeVar, cast

import msgspec

from ramify.clients.constraints import read
from ramify.clients.stream import UNSENT, Stream, TextDelta, Ticket
from ramify.protocol.errors import BadRequest, Cancelled, RamifyError, Skipped
from ramify.protocol.wire import Cancel, Done, Ok, StateReply, TokenLogprob, Usage

if TYPE_CHECKING:
    from ramify.clients.session_link import SessionLink

T = TypeVar("T")
Parsed = TypeVar("Parsed")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that ended, or a choice that was selected.

    `position`: the branch's length after it, in tokens. `content`, `reasoning`: the answer without
    thoughts and calls, and what was thought, where the session was opened with `parts=True`, and of a
    constraint with `after_thought`. `tokens`:
    where it was opened with `tokens=True`; `logprobs`: where asked for. `notes`: what a constraint's
    language leaves out of what was asked for, in sentences.
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
    choice: int | None = None  # of a `select`: which of its choices
    scores: list[float] | None = None  # of all its choices
    mean_logprob: float | None = None
    content: str | None = None
    reasoning: str | None = None
    notes: list[str] | None = None


class Handle(Coroutine[Any, Any, T]):
    """An op that is on its way. It may be awaited, more than once, and run as a task.

    `asyncio.create_task` and `TaskGroup` want a coroutine, not any awaitable, so this is one: each
    task that runs it drives an awaiting of its own.
    """

    def __init__(self, link: "SessionLink", ticket: Ticket) -> None:
        self._link = link
        self._ticket = ticket
        self._driven: dict[asyncio.Task[Any] | None, Generator[Any, None, T]] = {}

    async def _end(self) -> T:
        """Wait for the end."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Called when the last waiting task has gone."""

    def __await__(self) -> Generator[Any, None, T]:
        return self._end().__await__()

    def send(self, value: Any) -> Any:
        """Run a step of the running task, for the event loop."""
        task = asyncio.current_task()
        if task not in self._driven:
            self._driven[task] = self.__await__()
        return self._step(task, lambda driven: driven.send(value))

    def throw(self, *error: Any) -> Any:
        """Cancel the running task, for the event loop."""
        task = asyncio.current_task()
        if task not in self._driven:  # before its first step
            self._leave()
            self._driven[task] = self.__await__()
        return self._step(task, lambda driven: driven.throw(*error))

    def _step(
        self, task: asyncio.Task[Any] | None, step: Callable[[Generator[Any, None, T]], Any]
    ) -> Any:
        try:
            return step(self._driven[task])
        except BaseException:  # it returned, or it failed
            del self._driven[task]
            raise

    def close(self) -> None:
        """Close a task that will not run, for the event loop."""
        self._leave()
        driven = list(self._driven.values())
        self._driven.clear()
        for each in driven:
            each.close()


class Reply(Handle[list[Ok | StateReply]]):
    """An op without text; awaiting it gives its replies, one for each branch it names."""

    async def _end(self) -> list[Ok | StateReply]:
        while not self._ticket.settled:
            await self._link.changed(self._ticket)
        if self._ticket.error is not None:
            raise self._ticket.error
        return [reply for reply in self._ticket.replies if not isinstance(reply, Done)]


class Generation(Handle[Result]):
    """A generation: iterate over it for `TextDelta`s, await it for the `Result`, or both.

    Unread deltas are merged: memory is that of the text. Leaving an `async for` early (`break`,
    `return`, an exception) cancels the generation on the server, and so does cancelling a task that
    waits here: the next turn need not wait for unwanted text. To read a part and let it run on, take
    deltas with `anext`. A generation without a reader runs to its end. A cancelled one ends with reason
    "cancelled" and keeps its text.

    A loop counts as left when Python frees its iterator; CPython does so at once. Use `async with
    generation` or `aclose` to depend on nothing.
    """

    def __init__(self, link: "SessionLink", ticket: Ticket, stream: Stream, kind: Any = None) -> None:
        """`kind`: the type whose JSON the output is."""
        super().__init__(link, ticket)
        self._stream = stream
        self._kind = kind

    def __repr__(self) -> str:
        return (
            f"<Generation on {self.branch!r}: await it for its Result, or iterate over it for its text>"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": await it, its result has {name}" if name in Result.__struct_fields__ else ""
            raise AttributeError(f"a generation that is on its way has no {name!r}{hint}")

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

    async def parsed(self) -> Any:
        """Wait for the end. Returns the object of the `type` that was asked for.

        Raises ValueError if the text is not one, because it was cut by `max_tokens` for example.
        """
        if self._kind is None:
            raise BadRequest("the generation has no type: give generate(type=...)")
        result = await self
        text = result.text if result.content is None else result.content
        return read(self._kind, text, result.reason)

    async def progress(self) -> None:
        """Wait until there is more of it."""
        if not self._stream.settled:
            await self._changed()

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return _TextReader(self)

    async def __anext__(self) -> TextDelta:
        while True:
            delta = self._stream.take()
            if delta is not None and (delta.text or delta.tokens or delta.cut):
                return delta
            if self._stream.settled:
                self._raise()
                raise StopAsyncIteration
            await self._changed()

    async def _end(self) -> Result:
        while not self._stream.settled:
            await self._changed()
        self._raise()
        return result_of(self._stream)

    def _leave(self) -> None:
        self.cancel()

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
            self._link.submit([Cancel(id=UNSENT, branch=stream.branch)])
        elif ticket.id is not None:
            self._link.submit([Cancel(id=UNSENT, ops=[ticket.id])])

    async def aclose(self) -> None:
        """Cancel, for `contextlib.aclosing`. Does not wait: await the generation for its result."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class TypedGeneration(Generation, Generic[Parsed]):
    """A generation whose output is the JSON of a Python type."""

    async def parsed(self) -> Parsed:
        """Wait for the end. Returns the object. Raises ValueError if the text is none (`max_tokens`)."""
        return cast(Parsed, await super().parsed())


class _TextReader:
    """The iterator of one `async for`. Freed before the generation's end, it cancels that."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> "_TextReader":
        return self

    async def __anext__(self) -> TextDelta:
        return await self._generation.__anext__()

    def __del__(self) -> None:
        if not self._generation.ended and not self._loop.is_closed():
            # Python may free it at any time, in any thread: what it asks for is done by the loop.
            self._loop.call_soon_threadsafe(self._generation.cancel)


def result_of(stream: Stream) -> Result:
    """Make the result of a stream that ended well."""
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
        choice=done.choice,
        scores=done.scores,
        mean_logprob=done.mean_logprob,
        content=done.content,
        reasoning=done.reasoning,
        notes=done.notes,
    )
