"""A program's state: one branch that is written to, and the values that its gaps get.

A prompt is a stream: `+=` returns at once, and a task sends what was added, in order. Reading a
value waits for it. Each gap is sent when everything before it on its branch has succeeded, so
after an error nothing of the branch runs on a wrong prompt.

Knows branches and ops through `Session.send`; it does not know connections.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from ramify.clients.errors import Cancelled
from ramify.clients.generation import Result
from ramify.clients.program.expressions import Expression, Gap, TurnRole, flatten
from ramify.clients.program.writer import Writer
from ramify.clients.stream import TextDelta
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import ChatMessage, Fork, Op, Rollback

Job = Callable[[], Awaitable[None]]


class Running(Protocol):
    """A gap that is being filled: `Generation`, or what another backend has in its place."""

    @property
    def text(self) -> str: ...
    async def progress(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[TextDelta]: ...
    def __await__(self) -> Generator[Any, None, Result]: ...


class Backend(Protocol):
    """What a program runs on: a `Session`, or an `ApiSession`."""

    def fresh_names(self, parent: str, count: int, /) -> list[str]: ...
    async def send(self, ops: Sequence[Op], /) -> Sequence[Any]:
        """Send ops of one branch in one frame. For each, something to await; for a gap a `Running`."""
        ...

    def branch(self, name: str, /) -> "Place": ...


class Place(Protocol):
    """A branch of a backend."""

    @property
    def position(self) -> int | None: ...


class Piece(msgspec.Struct, frozen=True):
    """Text that a gap of a running program got. `cut`: characters to take back first."""

    branch: str
    name: str | None
    text: str
    cut: int = 0


Listener = Callable[[Piece], None]


class Value:
    """What a gap gets: await it for the text, iterate it for the text as it comes."""

    def __init__(self, gap: Gap) -> None:
        self.gap = gap
        loop = asyncio.get_running_loop()
        self._generation: asyncio.Future[Running] = loop.create_future()
        self._result: asyncio.Future[Result] = loop.create_future()
        for future in (self._generation, self._result):
            future.add_done_callback(_look)

    def __await__(self) -> Generator[Any, None, str]:
        return self._text().__await__()

    async def _text(self) -> str:
        return (await self.result()).text

    async def result(self) -> Result:
        """All about the generation: text, reason, usage. Raises what went wrong."""
        return await asyncio.shield(self._result)

    async def __aiter__(self) -> AsyncIterator[str]:
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

    def fail(self, error: BaseException) -> None:
        """It will never have a text."""
        for future in (self._generation, self._result):
            if not future.done():
                future.set_exception(error)


class Mark:
    """A place on a branch to go back to."""

    def __init__(self, record: int, gaps: int) -> None:
        self.record = record
        self.gaps = gaps
        self.position: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.position.add_done_callback(_look)


class Family:
    """What the states of one run share: the session, and each other."""

    def __init__(self, session: Backend, listener: Listener | None) -> None:
        self.session = session
        self.listener = listener
        self.states: list[AsyncState] = []


class AsyncState:
    """One branch of a running program, for programs that are `async def`.

    `s += ...` adds text, turns and gaps; `await s["name"]` reads; `s.fork(3)` makes children that
    share everything so far.
    """

    def __init__(
        self,
        family: Family,
        writer: Writer,
        *,
        gaps: Sequence[Value] = (),
        born: "asyncio.Future[None] | None" = None,
    ) -> None:
        self._family = family
        self._writer = writer
        self._gaps = list(gaps)
        self._born = born
        self._jobs: deque[Job] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        family.states.append(self)

    # --- writing ------------------------------------------------------------------------------

    def __iadd__(self, expression: Expression) -> "AsyncState":
        for ops, gap in self._writer.write(flatten(expression)):
            value = Value(gap)
            self._gaps.append(value)
            if self._error is not None:
                value.fail(self._error)
            self._add(lambda ops=ops, value=value: self._fill(ops, value))  # type: ignore[misc]
        return self

    def flush(self) -> None:
        """Send what waits for a gap now, so that it is computed while the program does other things."""
        self._send(self._writer.flush())

    def mark(self) -> Mark:
        """This place, for `rollback`."""
        self.flush()
        mark = Mark(len(self._writer.record), len(self._gaps))

        async def note() -> None:
            mark.position.set_result(self._family.session.branch(self.branch).position or 0)

        self._add(note)
        return mark

    def rollback(self, mark: Mark) -> None:
        """Forget what was added since `mark`; values that were read stay as they are."""
        self._writer.rewind(mark.record)
        del self._gaps[mark.gaps :]

        async def back() -> None:
            await self._run([Rollback(id=0, branch=self._writer.branch, to=await mark.position)])

        self._add(back)

    # --- reading ------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Value:
        for value in reversed(self._gaps):
            if value.gap.name == name:
                return value
        names = [value.gap.name for value in self._gaps if value.gap.name is not None]
        raise KeyError(f"nothing is called {name!r} here; there is {', '.join(names) or 'nothing yet'}")

    def __contains__(self, name: str) -> bool:
        return any(value.gap.name == name for value in self._gaps)

    def names(self) -> list[str]:
        """The names of the gaps so far, each once."""
        return list(dict.fromkeys(v.gap.name for v in self._gaps if v.gap.name is not None))

    async def text(self) -> str:
        """Everything so far, without the chat template's marks. Waits for what is generated."""
        return "".join([text async for _, text in self._told()])

    async def messages(self) -> list[ChatMessage]:
        """Everything so far as chat turns; text outside of turns counts as a user's."""
        turns: list[tuple[object, ChatMessage]] = []
        async for key, text in self._told():
            if turns and turns[-1][0] == key:
                last = turns[-1][1]
                turns[-1] = key, ChatMessage(role=last.role, content=last.content + text)
            else:
                turns.append((key, ChatMessage(role=key[1] or "user", content=text)))
        return [turn for _, turn in turns]

    async def _told(self) -> AsyncIterator[tuple[tuple[int, TurnRole | None], str]]:
        gaps = iter(list(self._gaps))
        for turn, role, item in list(self._writer.record):
            yield (turn, role), item if isinstance(item, str) else await next(gaps)

    # --- children -----------------------------------------------------------------------------

    def fork(self, count: int = 2) -> "Forks":
        """Children that share this state up to here. What is computed of it is computed once."""
        if count < 1:
            raise ValueError(f"fork({count}): at least 1")
        names = self._family.session.fresh_names(self._writer.branch, count)
        ops = [*self._writer.flush(), Fork(id=0, branch=self._writer.branch, as_=names)]
        born: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        born.add_done_callback(_look)

        async def bear() -> None:
            try:
                await self._run(ops)
            except BaseException as error:
                born.set_exception(error)
                raise
            born.set_result(None)

        if self._error is not None:
            born.set_exception(self._error)
        self._add(bear)
        return Forks(
            AsyncState(self._family, self._writer.fork(name), gaps=self._gaps, born=born)
            for name in names
        )

    # --- life ---------------------------------------------------------------------------------

    @property
    def born(self) -> bool:
        """Whether its branch was made."""
        born = self._born
        return born is None or (born.done() and not born.cancelled() and born.exception() is None)

    @property
    def branch(self) -> str:
        """The name of its branch, for ops that the language has no word for."""
        return self._writer.branch

    async def finish(self) -> None:
        """Wait until everything added here is done. Raises what went wrong."""
        self.flush()
        while self._worker is not None:
            await self._worker
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        """Stop what runs here; values that are not there yet never come."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    def _add(self, job: Job) -> None:
        if self._error is not None:  # nothing runs behind a failure
            return
        self._jobs.append(job)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name=f"program {self._writer.branch}")

    async def _work(self) -> None:
        try:
            if self._born is not None:
                await asyncio.shield(self._born)
            while self._jobs:
                await self._jobs.popleft()()
        except asyncio.CancelledError:
            self._fail(Cancelled("the program was stopped"))
            raise
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, RamifyError):
                raise
        finally:
            self._worker = None

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._jobs.clear()
        for value in self._gaps:
            value.fail(error)

    def _send(self, ops: Sequence[Op]) -> None:
        if ops:
            self._add(lambda: self._run(ops))

    async def _run(self, ops: Sequence[Op]) -> None:
        for handle in await self._family.session.send(ops):
            await handle

    async def _fill(self, ops: Sequence[Op], value: Value) -> None:
        family = self._family
        *before, last = await family.session.send(ops)
        for handle in before:
            await handle
        await value.run(last, self._writer.branch, family.listener)


class Forks(list[AsyncState]):
    """The children of a fork."""

    def __init__(self, children: Iterable[AsyncState]) -> None:
        super().__init__(children)

    async def values(self, name: str) -> list[str]:
        """What the gap `name` got in each child, in order."""
        return list(await asyncio.gather(*(child[name] for child in self)))

    async def finish(self) -> None:
        """Wait until every child is done."""
        for child in self:
            await child.finish()


def _look(future: "asyncio.Future[Any]") -> None:
    """Nobody has to read a value: asyncio is not to complain about its error."""
    if not future.cancelled():
        future.exception()
