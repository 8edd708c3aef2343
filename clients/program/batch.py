"""Many runs of one program: several at once over several sockets, ordered, each failing alone.

With a file, each result is a line of JSON as soon as it is there, and a later call with the same
items takes it from there. A line names its item by number and by a digest of its arguments, so that
a file of other items is not taken for these.
"""

import asyncio
import hashlib
import inspect
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, get_type_hints

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ramify.clients.errors import SessionLost
from ramify.clients.generation import Result
from ramify.clients.program.steps import Backend
from ramify.protocol.wire import ChatMessage

if TYPE_CHECKING:
    from ramify.clients.program.program import Program

Item: TypeAlias = Mapping[str, Any] | tuple[Any, ...]
TRIES = 3  # of an item whose session was lost, with the server
T = TypeVar("T")


class Run(msgspec.Struct, Generic[T], frozen=True):
    """A program that has run. `run["name"]` is the text of a gap.

    `value`: what the function returned. `results`: of the gaps of its own branch, by name, the last
    of each. `messages`: the branch as a chat.
    """

    value: T
    results: dict[str, Result]
    messages: list[ChatMessage]

    def __getitem__(self, name: str) -> str:
        return self.results[name].text

    def text(self) -> str:
        """The branch without the chat template's marks."""
        return "".join(message.content for message in self.messages)


class Failed(msgspec.Struct, frozen=True):
    """An item of a batch that failed. `error`: what was raised."""

    error: Exception


class _BatchLine(msgspec.Struct, frozen=True, omit_defaults=True):
    item: int
    digest: str
    run: msgspec.Raw = msgspec.Raw()
    error: str | None = None


class Batch(Generic[T]):
    """Many runs of one program. Raises TypeError for an item that does not fit its arguments."""

    def __init__(
        self, program: "Program[Any, T]", items: list[Item], path: Path | None, progress: bool
    ) -> None:
        self._program = program
        self._arguments = [_arguments(program, number, item) for number, item in enumerate(items)]
        self._path = path
        self._done: dict[int, Run[T] | Failed] = {}
        self._left: deque[int] = deque()
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not progress,
        )

    async def run(self, concurrency: int, sockets: int) -> list[Run[T] | Failed]:
        """Run the items that are not done. Raises ValueError for numbers below 1."""
        if concurrency < 1 or sockets < 1:
            raise ValueError(f"concurrency={concurrency}, sockets={sockets}: both are at least 1")
        total = len(self._arguments)
        digests = [_digest(each) for each in self._arguments] if self._path is not None else [""] * total
        if self._path is not None:
            self._read(self._path, digests)
        self._left.extend(number for number in range(total) if number not in self._done)
        count = min(sockets, concurrency, len(self._left))
        with self._progress as bar:
            task = bar.add_task(self._program.__name__, total=total, completed=len(self._done))
            shares = [concurrency // count + (i < concurrency % count) for i in range(count)]
            async with asyncio.TaskGroup() as group:
                for share in shares:
                    group.create_task(self._socket(share, digests, lambda: bar.advance(task)))
        return [self._done[number] for number in range(total)]

    async def _socket(self, share: int, digests: list[str], advance: Any) -> None:
        """Run items in one session at a time, `share` of them at once."""
        lock = asyncio.Lock()
        async with AsyncExitStack() as stack:
            current: list[Backend] = []

            async def session() -> Backend:
                async with lock:
                    if not current or getattr(current[-1], "error", None) is not None:
                        current.append(await stack.enter_async_context(self._program.session()))
                    return current[-1]

            async def work() -> None:
                while self._left:
                    number = self._left.popleft()
                    self._done[number] = result = await self._one(number, session)
                    self._write(number, digests[number], result)
                    advance()

            async with asyncio.TaskGroup() as group:
                for _ in range(share):
                    group.create_task(work())

    async def _one(self, number: int, session: Any) -> Run[T] | Failed:
        bound = self._arguments[number]
        for attempt in range(TRIES):
            try:
                return await self._program.run_on(await session(), None, *bound.args, **bound.kwargs)
            except SessionLost as error:
                if attempt == TRIES - 1 or self._program.settings.session is not None:
                    return Failed(error)
            except Exception as error:
                return Failed(error)
        raise AssertionError("unreachable")

    # --- the file -------------------------------------------------------------------------------

    def _read(self, path: Path, digests: list[str]) -> None:
        """Read what an earlier call has done. A last line that was cut off is dropped."""
        if not path.exists():
            return
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            path.write_bytes(whole)
        kind: Any = Run[_returned(self._program)]  # type: ignore[misc]
        for line in map(str.strip, whole.decode().splitlines()):
            if not line:
                continue
            entry = msgspec.json.decode(line, type=_BatchLine)
            if not entry.item < len(digests) or entry.digest != digests[entry.item]:
                raise ValueError(
                    f"{path} holds results of other items (item {entry.item} differs): name another file"
                )
            if entry.error is None:
                self._done[entry.item] = msgspec.json.decode(entry.run, type=kind)

    def _write(self, number: int, digest: str, result: Run[T] | Failed) -> None:
        if self._path is None:
            return
        if isinstance(result, Failed):
            line = _BatchLine(number, digest, error=f"{type(result.error).__name__}: {result.error}")
        else:
            line = _BatchLine(number, digest, run=msgspec.Raw(msgspec.json.encode(result)))
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def _arguments(program: "Program[Any, Any]", number: int, item: Item) -> inspect.BoundArguments:
    if not isinstance(item, Mapping | tuple):
        raise TypeError(
            f"item {number} is a {type(item).__name__}: give a mapping of arguments, or a tuple"
        )
    signature = inspect.signature(program.function)
    _, *rest = signature.parameters.values()
    try:
        own = signature.replace(parameters=rest)
        return own.bind(**item) if isinstance(item, Mapping) else own.bind(*item)
    except TypeError as error:
        raise TypeError(f"item {number} does not fit {program.__name__}(): {error}") from None


def _digest(arguments: inspect.BoundArguments) -> str:
    data = msgspec.json.encode([arguments.args, dict(sorted(arguments.kwargs.items()))])
    return hashlib.sha256(data).hexdigest()[:16]


def _returned(program: "Program[Any, Any]") -> Any:
    """Find the type of what the function returns, for values read from a file."""
    try:
        return get_type_hints(program.function).get("return", Any)
    except NameError:
        return Any
