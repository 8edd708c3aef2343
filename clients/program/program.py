"""`@program`: a function over a state becomes something that runs on a server.

    @program
    def capital(s: State, country: str) -> str:
        s += user(f"What is the capital of {country}?") + assistant(gen("city", max_tokens=8))
        return s["city"]

    capital.run("France").value

A plain function gets a `State` and runs in a thread of its own; an `async def` gets an `AsyncState`.
Each run has a branch of its own, which is dropped at its end, with all that was forked off it.
"""

import asyncio
import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, cast, overload

import msgspec

from ramify.clients.connect import connect
from ramify.clients.options import GenerateOptions
from ramify.clients.program.batch import Batch, Failed, Item, Run
from ramify.clients.program.call_sites import SOMEWHERE
from ramify.clients.program.graph import Graph, StepRecorder
from ramify.clients.program.reorder import Reordering, mark, reordering
from ramify.clients.program.run_states import RunStates
from ramify.clients.program.state import AsyncState
from ramify.clients.program.steps import Backend, Compiled, Sender, Step, all_of
from ramify.clients.program.sync import State, in_thread
from ramify.clients.program.tracing import NeedsText
from ramify.clients.program.value import Listener, Piece
from ramify.clients.program.writer import Writer
from ramify.clients.sync import LoopThread
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Drop, Fork

DEFAULT_URL = "ws://127.0.0.1:8765/v1/ws"
DROPPED = 1024  # branches in one `drop`
P = ParamSpec("P")
T = TypeVar("T")


class ProgramSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a program runs. `options`: for every gap without its own."""

    url: str | None = None
    session: Backend | None = None
    connect: dict[str, Any] = {}
    options: dict[str, Any] = {}
    compiled: Compiled = "auto"
    reorder: bool = False


class Program(Generic[P, T]):
    """A function over a state. Made by `program`."""

    def __init__(
        self,
        function: Callable[..., Any],
        settings: ProgramSettings = ProgramSettings(),  # noqa: B008
    ) -> None:
        self.function = function
        self.settings = settings
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", "program")

    def __repr__(self) -> str:
        return f"<program {self.__name__}>"

    @overload
    def __call__(self, s: State, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def __call__(self, s: AsyncState, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...
    def __call__(self, s: State | AsyncState, /, *args: P.args, **kwargs: P.kwargs) -> T | Awaitable[T]:
        """Run the program as a part of another one, on that one's state."""
        return cast("T | Awaitable[T]", self.function(s, *args, **kwargs))

    def using(
        self,
        url: str | None = None,
        *,
        session: Backend | None = None,
        connect: Mapping[str, Any] | None = None,
        compiled: Compiled | None = None,
        reorder: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "Program[P, T]":
        """Make the program with other settings."""
        now = self.settings
        return Program(
            self.function,
            ProgramSettings(
                url=url or now.url,
                session=session or now.session,
                connect={**now.connect, **(connect or {})},
                options={**now.options, **options},
                compiled=now.compiled if compiled is None else compiled,
                reorder=now.reorder if reorder is None else reorder,
            ),
        )

    # --- without `await` ------------------------------------------------------------------------

    def run(self, *args: P.args, **kwargs: P.kwargs) -> Run[T]:
        """Run the program and wait. Raises what it raised, or what went wrong on the server."""
        with _loop() as thread:
            return thread.run(self.arun(*args, **kwargs))

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Piece]:
        """Run the program and yield the text of its gaps as it comes. Leaving the loop cancels it."""
        with _loop() as thread:
            pieces = self.astream(*args, **kwargs)
            try:
                while (piece := thread.run(_next(pieces))) is not None:
                    yield piece
            finally:
                thread.run(_close(pieces))

    def run_batch(
        self,
        items: Iterable[Item],
        *,
        concurrency: int = 64,
        sockets: int = 4,
        progress: bool = False,
        results: str | Path | None = None,
    ) -> list[Run[T] | Failed]:
        """Run the program for each item, several at once; the results are in the items' order.

        An item is a mapping of keyword arguments, or a tuple of arguments. One that fails becomes a
        `Failed`. `concurrency`: how many run at once, over so many `sockets`. `progress`: show it on
        standard error. `results`: a file that keeps what is done; the same call after an
        interruption goes on where it was, and runs what had failed again.
        """
        with _loop() as thread:
            return thread.run(
                self.arun_batch(
                    items, concurrency=concurrency, sockets=sockets, progress=progress, results=results
                )
            )

    # --- with `await` ---------------------------------------------------------------------------

    async def arun(self, *args: P.args, **kwargs: P.kwargs) -> Run[T]:
        """Run, for asynchronous code. See `run`."""
        async with self.session() as session:
            return await self.run_on(session, None, *args, **kwargs)

    async def astream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Piece]:
        """Stream, for asynchronous code. Close it (`aclose`) when you leave it early."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

        async def work() -> None:
            try:
                async with self.session() as session:
                    await self.run_on(session, pieces.put_nowait, *args, **kwargs)
            finally:
                pieces.put_nowait(None)

        task = asyncio.create_task(work())
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def arun_batch(
        self,
        items: Iterable[Item],
        *,
        concurrency: int = 64,
        sockets: int = 4,
        progress: bool = False,
        results: str | Path | None = None,
    ) -> list[Run[T] | Failed]:
        """Run a batch, for asynchronous code. See `run_batch`."""
        batch = Batch(self, list(items), None if results is None else Path(results), progress)
        return await batch.run(concurrency, sockets)

    async def run_on(
        self, session: Backend, listener: Listener | None, *args: P.args, **kwargs: P.kwargs
    ) -> Run[T]:
        """Run on a new branch in `session`. `listener` gets the text of all gaps."""
        sender = Sender(
            session, self.settings.compiled, yields=inspect.iscoroutinefunction(self.function)
        )
        family = RunStates(sender, listener)
        edit = (await self._reordering(*args, **kwargs)).text if self.settings.reorder else None
        state = self._root(family, edit)
        try:
            value = await self._call(state, *args, **kwargs)
            family.at = "at its end"
            for each in family.states:
                await each.finish()
            results = {each: await state[each].result() for each in state.names()}
            return Run(value, results, await state.messages())
        finally:
            await _end(family, state.branch)

    def _root(self, family: RunStates, edit: Callable[[str], str] | None = None) -> AsyncState:
        """Make a state on a new branch without a parent."""
        (name,) = family.sender.session.fresh_names("program", 1)
        state = AsyncState(family, Writer(name, cast(GenerateOptions, self.settings.options), edit))
        ops = [Fork(id=0, branch=None, as_=[name])]
        state.birth = Step(lambda: ops, all_of, writes=[state])
        state.add(state.birth)
        return state

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Graph:
        """Trace the ops that `run` would send, as a graph, without a server. See `Graph`.

        Texts of gaps are holes that may be passed on and returned. Where Python needs a text the trace
        ends, and so does the frame that `run` sends.
        """
        with _loop() as thread:
            return thread.run(self.atrace(*args, **kwargs))

    async def atrace(self, *args: P.args, **kwargs: P.kwargs) -> Graph:
        """Trace, for asynchronous code. See `trace`."""
        if not self.settings.reorder:
            return await self._traced(None, *args, **kwargs)
        made = await self._reordering(*args, **kwargs)
        graph = await self._traced(made.text, *args, **kwargs)
        return msgspec.structs.replace(graph, moved=list(map(str, made.moved)))

    async def _reordering(self, *args: P.args, **kwargs: P.kwargs) -> Reordering:
        """Work out the reordering for these arguments. Raises what the function raises."""
        signature = inspect.signature(self.function)
        given = signature.bind(None, *args, **kwargs)
        _, *names = given.arguments
        arguments = {name: given.arguments[name] for name in names}
        given.arguments.update({name: mark(value, name) for name, value in arguments.items()})
        marked = cast(Any, {"args": given.args[1:], "kwargs": given.kwargs})
        traced = cast(Any, self._traced)  # marked arguments are not of the types that P names
        graph = await traced(None, *marked["args"], **marked["kwargs"])
        return reordering(graph.ops, arguments)

    async def _traced(
        self, edit: Callable[[str], str] | None, *args: P.args, **kwargs: P.kwargs
    ) -> Graph:
        recorder = StepRecorder(self.__name__)
        family = RunStates(recorder, None, tracing=True)
        state = self._root(family, edit)
        why: str | None = None
        try:
            await self._call(state, *args, **kwargs)
        except NeedsText as needed:
            why = f"{family.where() if needed.place == SOMEWHERE else needed.place}: {needed}"
        for each in family.states:
            await each.finish()
        return recorder.graph(why)

    async def _call(self, state: AsyncState, *args: P.args, **kwargs: P.kwargs) -> T:
        if inspect.iscoroutinefunction(self.function):
            return cast(T, await self.function(state, *args, **kwargs))
        s = State(LoopThread.running(), state)
        return cast(T, await in_thread(lambda: self.function(s, *args, **kwargs), self.__name__))

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Backend]:
        """Give the session to run in: the given one, or one of its own."""
        if self.settings.session is not None:
            yield self.settings.session
            return
        url = self.settings.url or os.environ.get("RAMIFY_URL") or DEFAULT_URL
        async with connect(url, **self.settings.connect) as session:
            yield session


@overload
def program(function: Callable[Concatenate[AsyncState, P], Awaitable[T]], /) -> Program[P, T]: ...
@overload
def program(function: Callable[Concatenate[State, P], T], /) -> Program[P, T]: ...
def program(function: Callable[..., Any], /) -> Program[..., Any]:
    """Make a program of a function whose first argument is its state."""
    return Program(function)


async def _end(family: RunStates, root: str) -> None:
    """Stop what still runs, and drop every branch. A compiled run that went well does not wait."""
    sender = family.sender
    stopped = await sender.stop(root)
    waits = sender.eager or stopped or any(state.error is not None for state in family.states)
    names = [state.branch for state in family.states if state.born]
    for start in range(0, len(names), DROPPED):
        with contextlib.suppress(RamifyError):  # the session is over, and its branches with it
            replies = await sender.session.send([Drop(id=0, branch=names[start : start + DROPPED])])
            for reply in replies if waits else ():
                await reply


@contextlib.contextmanager
def _loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    try:
        yield thread
    finally:
        thread.stop()


async def _next(pieces: AsyncIterator[Piece]) -> Piece | None:
    return await anext(pieces, None)


async def _close(pieces: AsyncIterator[Piece]) -> None:
    await cast(Any, pieces).aclose()
