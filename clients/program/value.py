"""The values of gaps: texts that can be awaited, or read as they come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, Protocol, cast

import msgspec

from ramify.clients.constraints import read
from ramify.clients.generation import Result
from ramify.clients.program.expressions import Gap, Gen
from ramify.clients.program.steps import Step
from ramify.clients.program.tracing import Hole, NeedsText
from ramify.clients.stream import TextDelta
from ramify.protocol.errors import BadRequest


class Running(Protocol):
    """A gap that is being filled: `Generation`, or what another backend has in its place."""

    @property
    def text(self) -> str: ...
    async def progress(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[TextDelta]: ...
    def __await__(self) -> Generator[Any, None, Result]: ...


class Piece(msgspec.Struct, frozen=True):
    """Text that a gap of a running program got. `cut`: characters to take back first."""

    branch: str
    name: str | None
    text: str
    cut: int = 0


Listener = Callable[[Piece], None]


class Readers(Protocol):
    """Is told before a task waits for a text."""

    tracing: bool

    def reads(self) -> None: ...


class Value:
    """The value of a gap: await it for the text, iterate it for the text as it comes."""

    def __init__(self, gap: Gap, readers: Readers) -> None:
        self.gap = gap
        self.hidden = False  # its text stays on the server
        self.scored = False  # with log-probabilities
        self.noted = False  # an agent's: its text is told by a message of the record
        self.step: Step | None = None
        self._readers = readers
        loop = asyncio.get_running_loop()
        self._generation: asyncio.Future[Running] = loop.create_future()
        self._result: asyncio.Future[Result] = loop.create_future()
        for future in (self._generation, self._result):
            future.add_done_callback(look)

    @property
    def name(self) -> str | None:
        return self.gap.name

    def __await__(self) -> Generator[Any, None, str]:
        return self._text().__await__()

    async def _text(self) -> str:
        if self.hidden:
            raise BadRequest(
                f"the gap {self.name!r} is hidden: its text stays on the server, for a join or a prune"
            )
        return (await self.result()).text

    async def parsed(self) -> Any:
        """Wait for the object of the gap's `type`. Raises ValueError if the text was cut."""
        kind = self.gap.type if isinstance(self.gap, Gen) else None
        if kind is None:
            raise BadRequest(f"the gap {self.name!r} has no type: give gen(type=...)")
        return read(kind, await self._text(), (await self.result()).reason)

    async def result(self) -> Result:
        """Wait for the generation. Returns its text, reason and usage. Raises what went wrong."""
        if self._readers.tracing:
            return cast(Result, Hole(self.name))
        if not self._result.done():
            self._readers.reads()
        return await asyncio.shield(self._result)

    async def __aiter__(self) -> AsyncIterator[str]:
        if self._readers.tracing:
            raise NeedsText("reads a text as it comes")
        if self.noted:
            yield (await self._result).text
            return
        self._readers.reads()
        generation = await asyncio.shield(self._generation)
        sent = 0
        while True:
            text = generation.text
            if len(text) > sent:
                yield text[sent:]
                sent = len(text)
            elif self._result.done():
                return
            else:
                await generation.progress()

    async def run(self, generation: Running, branch: str, listener: Listener | None) -> None:
        """Wait for the generation. Raises what went wrong."""
        self._generation.set_result(generation)
        if listener is not None:
            async for delta in generation:
                listener(Piece(branch, self.gap.name, delta.text, delta.cut))
        self._result.set_result(await generation)

    def settle(self, result: Result) -> None:
        """Set the result: something else has filled the gap, on the program's branch."""
        self.noted = True
        self._result.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Set the error: there will be no text."""
        for future in (self._generation, self._result):
            if not future.done():
                future.set_exception(error)


class Inherited(Value):
    """A gap of a branch that a prune keeps: which one's is known when the prune is done."""

    def __init__(self, gap: Gap, readers: Readers, find: Callable[[], Awaitable[Value]]) -> None:
        super().__init__(gap, readers)
        self._find = find

    async def _text(self) -> str:
        if self._readers.tracing:
            return cast(str, Hole(self.name))
        return await (await self._find())

    async def result(self) -> Result:
        if self._readers.tracing:
            return cast(Result, Hole(self.name))
        return await (await self._find()).result()

    async def __aiter__(self) -> AsyncIterator[str]:
        if self._readers.tracing:
            raise NeedsText("reads a text as it comes")
        async for text in await self._find():
            yield text


def named(name: str | None) -> Gap:
    """Make a gap of which the name alone is known."""
    return Gen(name, {})


def look(future: "asyncio.Future[Any]") -> None:
    """Mark the future's error as seen: values need not be read, and asyncio would complain."""
    if not future.cancelled():
        future.exception()
