"""The client without `await`: the asyncio client in a thread of its own, and blocking handles.

    with connect_sync("ws://127.0.0.1:8765") as session:
        for delta in session.main.chat("Capital of France?"):
            print(delta.text, end="")

    session = connect_sync("ws://127.0.0.1:8765")      # the same; ends with `session.close()`

Handles may be used from several threads. This file knows no protocol: every method runs the
method of the same name on the loop's thread and waits for it. Where nothing but the waiting differs it
is made from that method (`_blocking`), so its signature and words stand once; type checkers and editors
see them. Methods that are given or give handles are written out: their types differ.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, cast, overload

from ramify.clients.branch import Branch
from ramify.clients.connect import ConnectSettings, connect
from ramify.clients.generation import Generation, Reply, Result, TypedGeneration
from ramify.clients.handles import Session
from ramify.clients.images import Images
from ramify.clients.options import (
    GenerateOptions,
    JoinOptions,
    PruneBy,
    Pruned,
    SelectOptions,
    TypedOptions,
)
from ramify.clients.stream import TextDelta
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Ok, Op, Role, StateReply

P = ParamSpec("P")
T = TypeVar("T")
Parsed = TypeVar("Parsed")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ramify-client", daemon=True)
        self._thread.start()

    @classmethod
    def running(cls) -> "LoopThread":
        """Wrap the loop that runs here, for handles that are used in other threads."""
        thread = cls.__new__(cls)
        thread._loop = asyncio.get_running_loop()
        thread._thread = threading.current_thread()
        return thread

    @property
    def stopped(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine there and wait. An exception here cancels it: Ctrl-C, or the TimeoutError that
        comes after `timeout` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function there and wait."""

        async def work() -> T:
            return function()

        return self.run(work())

    def post(self, function: Callable[[], object]) -> None:
        """Run a plain function there, before whatever is run there later. Does not wait."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """End the thread. May be called again."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class SyncGeneration:
    """Iterate over it for deltas; `result()` waits for the end.

    Leaving a `for` early cancels the generation; see `generation.Generation`.
    """

    def __init__(self, thread: LoopThread, generation: Generation) -> None:
        self._thread = thread
        self._generation = generation

    @property
    def branch(self) -> str:
        return self._generation.branch

    @property
    def text(self) -> str:
        """The text so far."""
        return self._thread.call(lambda: self._generation.text)

    @property
    def ended(self) -> bool:
        return self._generation.ended

    def __iter__(self) -> Iterator[TextDelta]:
        try:
            while (delta := self._thread.run(self._next())) is not None:
                yield delta
        finally:
            if not self._generation.ended:
                self._thread.post(self._generation.cancel)

    def __next__(self) -> TextDelta:
        delta = self._thread.run(self._next())
        if delta is None:
            raise StopIteration
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    async def _next(self) -> TextDelta | None:
        try:
            return await self._generation.__anext__()
        except StopAsyncIteration:
            return None

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises what went wrong.

        After `timeout` seconds the generation is cancelled, and TimeoutError raised.
        """

        async def wait() -> Result:
            return await self._generation

        return self._thread.run(wait(), timeout)

    def parsed(self, timeout: float | None = None) -> Any:
        """Wait for the end. Returns the object of the `type` asked for. See `Generation.parsed`."""
        return self._thread.run(self._generation.parsed(), timeout)

    def cancel(self) -> None:
        """Ask the server to stop."""
        self._thread.call(self._generation.cancel)


class TypedSyncGeneration(SyncGeneration, Generic[Parsed]):
    """A generation whose output is the JSON of a Python type."""

    def parsed(self, timeout: float | None = None) -> Parsed:
        """Wait for the end. Returns the object. See `Generation.parsed`."""
        return cast(Parsed, super().parsed(timeout))


class SyncReply:
    """An op of a program that is on its way."""

    def __init__(self, thread: LoopThread, reply: Reply) -> None:
        self._thread = thread
        self._reply = reply

    def result(self, timeout: float | None = None) -> list[Ok | StateReply]:
        """Wait for its replies. Raises TimeoutError after `timeout` seconds."""

        async def wait() -> list[Ok | StateReply]:
            return await self._reply

        return self._thread.run(wait(), timeout)


def _blocking(
    method: Callable[Concatenate[Branch, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[SyncBranch, P], T]":
    """Make a plain function of the method, which waits."""

    def call(self: "SyncBranch", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.thread.run(method(self.twin, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class SyncBranch:
    """A branch; see `handles.Branch`."""

    def __init__(self, thread: LoopThread, branch: Branch) -> None:
        self._thread = thread
        self._branch = branch

    def __repr__(self) -> str:
        return f"Sync{self._branch!r}"

    @property
    def thread(self) -> LoopThread:
        """The thread that runs its session."""
        return self._thread

    @property
    def twin(self) -> Branch:
        """The asynchronous branch, to be used in that thread."""
        return self._branch

    @property
    def name(self) -> str:
        return self._branch.name

    @property
    def position(self) -> int | None:
        return self._thread.call(lambda: self._branch.position)

    append = _blocking(Branch.append)
    say = _blocking(Branch.say)
    rollback = _blocking(Branch.rollback)
    set = _blocking(Branch.set)
    drop = _blocking(Branch.drop)
    cancel = _blocking(Branch.cancel)
    tree = _blocking(Branch.tree)

    @overload
    def generate(
        self, *, type: "type[Parsed]", n: None = None, **options: Unpack[GenerateOptions]
    ) -> TypedSyncGeneration[Parsed]: ...
    @overload  # a list of typed ones is no list of the others
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self,
        *,
        type: "type[Parsed]",
        n: int,
        names: Sequence[str] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[TypedSyncGeneration[Parsed]]: ...
    @overload
    def generate(self, *, n: None = None, **options: Unpack[TypedOptions]) -> SyncGeneration: ...
    @overload
    def generate(
        self, *, n: int, names: Sequence[str] | None = None, **options: Unpack[TypedOptions]
    ) -> list[SyncGeneration]: ...
    def generate(
        self, *, n: int | None = None, names: Sequence[str] | None = None, **options: Any
    ) -> Any:
        if n is None:
            return self._blocking_one(self._thread.call(lambda: self._branch.generate(**options)))
        many = self._thread.call(lambda: self._branch.generate(n=n, names=names, **options))
        return [self._blocking_one(generation) for generation in many]

    def _blocking_one(self, generation: Generation) -> SyncGeneration:
        made = TypedSyncGeneration if isinstance(generation, TypedGeneration) else SyncGeneration
        return made(self._thread, generation)

    def select(self, choices: Sequence[str], **options: Unpack[SelectOptions]) -> SyncGeneration:
        """See `handles.Branch.select`."""
        selection = self._thread.call(lambda: self._branch.select(choices, **options))
        return SyncGeneration(self._thread, selection)

    @overload
    def chat(
        self, text: str, *, type: "type[Parsed]", role: Role = "user", images: Images = (),
        **options: Unpack[GenerateOptions],
    ) -> TypedSyncGeneration[Parsed]: ...  # fmt: skip
    @overload
    def chat(
        self, text: str, *, role: Role = "user", images: Images = (), **options: Unpack[TypedOptions]
    ) -> SyncGeneration: ...
    def chat(self, text: str, **options: Any) -> Any:
        return self._blocking_one(self._thread.call(lambda: self._branch.chat(text, **options)))

    def fork(self, *names: str, at: int | None = None) -> "list[SyncBranch]":
        return [SyncBranch(self._thread, b) for b in self._thread.run(self._branch.fork(*names, at=at))]

    def join(self, *sources: "SyncBranch | str", **options: Unpack[JoinOptions]) -> Ok:
        """See `handles.Branch.join`."""
        return self._thread.run(self._branch.join(*_names(sources), **options))

    def prune(
        self,
        *sources: "SyncBranch | str",
        by: PruneBy = "logprob",
        score_from: "Sequence[SyncBranch | str] | None" = None,
        keep: bool = False,
    ) -> "Pruned[SyncBranch]":
        judges = None if score_from is None else _names(score_from)
        found = self._thread.run(
            self._branch.prune(*_names(sources), by=by, score_from=judges, keep=keep)
        )
        return _pruned(self._thread, found)


class SyncSession:
    """An attached session; see `handles.Session`. Made by `connect_sync`."""

    def __init__(self, thread: LoopThread, session: Session) -> None:
        self._thread = thread
        self._session = session
        self.main = SyncBranch(thread, session.main)

    def __enter__(self) -> "SyncSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def key(self) -> str | None:
        return self._session.key

    @property
    def error(self) -> RamifyError | None:
        """Why the session is over; None while it lives."""
        return self._session.error

    @property
    def keeping(self) -> tuple[float | None, str | None]:
        """See `handles.Session.keeping`."""
        return self._session.keeping

    @property
    def connected(self) -> bool:
        return self._session.connected

    @property
    def view_key(self) -> str | None:
        return self._session.view_key

    @property
    def tool_names(self) -> list[str]:
        return self._session.tool_names

    @property
    def notes(self) -> list[str]:
        return self._session.notes

    @property
    def model(self) -> str | None:
        return self._session.model

    @property
    def branches(self) -> list[SyncBranch]:
        names = self._thread.call(lambda: [branch.name for branch in self._session.branches])
        return [self.branch(name) for name in names]

    def branch(self, name: str) -> SyncBranch:
        return SyncBranch(self._thread, self._session.branch(name))

    def fork(self, *names: str, at: int | None = None) -> list[SyncBranch]:
        return self.main.fork(*names, at=at)

    def root(self, *names: str) -> list[SyncBranch]:
        return [SyncBranch(self._thread, b) for b in self._thread.run(self._session.root(*names))]

    def tree(self, *, branch: str | None = None, text: bool = False, tokens: bool = False) -> StateReply:
        return self._thread.run(self._session.tree(branch=branch, text=text, tokens=tokens))

    def prune(
        self,
        sources: "Sequence[SyncBranch | str]",
        *,
        into: "Sequence[SyncBranch | str] | None" = None,
        by: PruneBy = "logprob",
        k: int | None = None,
        score_from: "Sequence[SyncBranch | str] | None" = None,
        keep: bool = False,
    ) -> Pruned[SyncBranch]:
        found = self._thread.run(
            self._session.prune(
                _names(sources),
                into=None if into is None else _names(into),
                by=by,
                k=k,
                score_from=None if score_from is None else _names(score_from),
                keep=keep,
            )
        )
        return _pruned(self._thread, found)

    def cancel(self, *, subtree: bool = False) -> Ok:
        return self._thread.run(self._session.cancel(subtree=subtree))

    def export(self) -> bytes:
        """Ask for the session as one file; see `handles.Session.export`."""
        return self._thread.run(self._session.export())

    def send(
        self, ops: Sequence[Op | Mapping[str, Any]]
    ) -> "list[SyncReply | SyncGeneration | list[SyncGeneration]]":
        """Send one frame of ops; see `handles.Session.send`."""
        return [self._wrap(handle) for handle in self._thread.run(self._session.send(ops))]

    def _wrap(
        self, handle: Reply | Generation | list[Generation]
    ) -> "SyncReply | SyncGeneration | list[SyncGeneration]":
        if isinstance(handle, Reply):
            return SyncReply(self._thread, handle)
        if isinstance(handle, Generation):
            return SyncGeneration(self._thread, handle)
        return [SyncGeneration(self._thread, each) for each in handle]

    def close(self, *, keep: bool | None = None) -> None:
        """End the session; see `handles.Session.close`. The handles are of no use afterwards."""
        if self._thread.stopped:
            return
        try:
            self._thread.run(self._session.close(keep=keep))
        finally:
            self._thread.stop()


def _names(branches: Sequence[SyncBranch | str]) -> list[str]:
    return [branch if isinstance(branch, str) else branch.name for branch in branches]


def _pruned(thread: LoopThread, found: Pruned[Branch]) -> Pruned[SyncBranch]:
    winners = [SyncBranch(thread, branch) for branch in found.branches]
    return Pruned(winners, found.kept, found.dropped, found.scores)


def connect_sync(url: str, **settings: Unpack[ConnectSettings]) -> SyncSession:
    """Connect without `await`: the same settings and errors as `connect`. `close` it, or use `with`."""
    connecting = connect(url, **settings)
    thread = LoopThread()

    async def attach() -> Session:
        return await connecting

    try:
        return SyncSession(thread, thread.run(attach()))
    except BaseException:
        thread.stop()
        raise
