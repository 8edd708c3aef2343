"""The state for programs that are plain functions: the same without `await`, from a thread.

The program runs in a thread of its own and the session in an event loop; each method runs its twin
there and waits for it. Adding never waits for the model, reading does.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, overload

from ramify.clients.generation import Result
from ramify.clients.options import GenerateOptions, JoinOptions, PruneBy
from ramify.clients.program.call_sites import place
from ramify.clients.program.expressions import Expression
from ramify.clients.program.forks import Forks
from ramify.clients.program.run_states import Mark
from ramify.clients.program.state import AsyncState
from ramify.clients.program.value import Value
from ramify.clients.sync import LoopThread
from ramify.protocol.wire import ChatMessage

T = TypeVar("T")


class State:
    """One branch of a running program.

    `s += ...` adds text, turns and gaps; `s["name"]` waits for a gap's text; `s.fork(3)` makes children
    that share everything so far. See `AsyncState`.
    """

    def __init__(self, thread: LoopThread, state: AsyncState) -> None:
        self._thread = thread
        self.state = state

    def _call(self, function: Callable[[], T]) -> T:
        self.state.family.at = place()
        return self._thread.call(function)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self.state.family.at = place()
        return self._thread.run(work)

    def __iadd__(self, expression: Expression) -> "State":
        def add() -> None:
            state = self.state
            state += expression

        self._call(add)
        return self

    def __getitem__(self, name: str) -> str:
        value = self._value(name)

        async def text() -> str:
            return await value

        return self._run(text())

    def __contains__(self, name: str) -> bool:
        return self._call(lambda: name in self.state)

    def names(self) -> list[str]:
        """List the gaps so far, each once."""
        return self._call(self.state.names)

    def result(self, name: str) -> Result:
        """Wait for a gap's generation. Returns its text, reason and usage. Raises what went wrong."""
        return self._run(self._value(name).result())

    def parsed(self, name: str) -> Any:
        """Read the object of a gap that has a `type`. Raises ValueError if its text was cut."""
        return self._run(self._value(name).parsed())

    @overload
    def read(self, name: str, kind: type[T]) -> T: ...
    @overload
    def read(self, name: str, kind: Any) -> Any: ...  # a `Literal`, a union: no type for checkers
    def read(self, name: str, kind: Any) -> Any:
        """Read the text of a gap as a value: a number, a truth value, an enum, or what its JSON says.

        Raises ValueError for a text that is none.
        """
        return self._run(self.state.read(name, kind))

    def stream(self, name: str) -> Iterator[str]:
        """Yield the text of a gap as it comes."""
        deltas = aiter(self._value(name))
        while (text := self._run(_next(deltas))) is not None:
            yield text

    def text(self) -> str:
        """Read everything so far, without the chat template's marks."""
        return self._run(self.state.text())

    def messages(self) -> list[ChatMessage]:
        """Read everything so far as chat turns; text outside of turns counts as a user's."""
        return self._run(self.state.messages())

    def fork(self, count: int = 2, **options: Unpack[GenerateOptions]) -> "SyncForks":
        """Fork children that share this state up to here. What is computed of it is computed once.

        `options`: for their gaps that do not say otherwise. With `hidden=True` their text stays on the
        server, for a join or a prune.
        """
        return SyncForks(self._thread, self._call(lambda: self.state.fork(count, **options)))

    def flush(self) -> None:
        """Send what was held back, so that it is computed while the program does something else."""
        self._call(self.state.flush)

    def mark(self) -> Mark:
        """Mark this place, for `rollback`."""
        return self._call(self.state.mark)

    def rollback(self, mark: Mark) -> None:
        """Forget what was added since `mark`."""
        self._call(lambda: self.state.rollback(mark))

    def finish(self) -> None:
        """Wait until everything added here is done. Raises what went wrong."""
        self._run(self.state.finish())

    def apply(self, work: Callable[[AsyncState], Coroutine[Any, Any, T]]) -> T:
        """Run `work` on the asynchronous state, and wait for it."""
        return self._run(work(self.state))

    def _value(self, name: str) -> Value:
        return self._call(lambda: self.state[name])


class SyncForks(list[State]):
    """The children of a fork. See `Forks`."""

    def __init__(self, thread: LoopThread, forks: Forks) -> None:
        super().__init__(State(thread, child) for child in forks)
        self._thread = thread
        self._forks = forks

    def _call(self, function: Callable[[], T]) -> T:
        self._forks.parent.family.at = place()
        return self._thread.call(function)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._forks.parent.family.at = place()
        return self._thread.run(work)

    def values(self, name: str) -> list[str]:
        """Read the text of the gap `name` in each child, in order."""
        return self._run(self._forks.values(name))

    def finish(self) -> None:
        """Wait until every child is done."""
        self._run(self._forks.finish())

    def join(self, **options: Unpack[JoinOptions]) -> None:
        """See `Forks.join`."""
        self._call(lambda: self._forks.join(**options))

    def prune(
        self, k: int = 1, *, by: PruneBy = "logprob", judges: Sequence[State] | None = None
    ) -> "SyncForks":
        """Keep the best `k` children. See `Forks.prune`."""
        others = _states(judges)
        return SyncForks(self._thread, self._call(lambda: self._forks.prune(k, by=by, judges=others)))

    def adopt(self, *, by: PruneBy = "logprob", judges: Sequence[State] | None = None) -> None:
        """Have the state that was forked go on as the best child. See `prune`."""
        others = _states(judges)
        self._call(lambda: self._forks.adopt(by=by, judges=others))


def _states(judges: Sequence[State] | None) -> list[AsyncState] | None:
    return None if judges is None else [judge.state for judge in judges]


async def _next(deltas: AsyncIterator[str]) -> str | None:
    return await anext(deltas, None)


async def in_thread(function: Callable[[], T], name: str) -> T:
    """Run a function in a thread of its own: any number may wait at once, as a pool would not let them.

    If this is cancelled, the thread goes on until it next uses its state, which raises there.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[], None]) -> None:
        if not done.done():
            set_it()

    def work() -> None:
        try:
            value = function()
        except BaseException as error:
            set_it = partial(done.set_exception, error)
        else:
            set_it = partial(done.set_result, value)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, set_it)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done
