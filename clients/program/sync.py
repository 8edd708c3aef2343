"""The state for programs that are plain functions: the same without `await`, from a thread.

The program runs in a thread of its own and the session in an event loop; each method runs its twin
there and waits for it. Adding never waits for the model, reading does.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

from ramify.clients.generation import Result
from ramify.clients.program.expressions import Expression
from ramify.clients.program.state import AsyncState, Forks, Mark, Value
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
        self._state = state

    def __iadd__(self, expression: Expression) -> "State":
        def add() -> None:
            state = self._state
            state += expression

        self._thread.call(add)
        return self

    def __getitem__(self, name: str) -> str:
        return self.result(name).text

    def __contains__(self, name: str) -> bool:
        return self._thread.call(lambda: name in self._state)

    def names(self) -> list[str]:
        """The names of the gaps so far, each once."""
        return self._thread.call(self._state.names)

    def result(self, name: str) -> Result:
        """All about the generation of a gap: text, reason, usage. Raises what went wrong."""
        return self._thread.run(self._value(name).result())

    def stream(self, name: str) -> Iterator[str]:
        """The text of a gap as it comes."""
        deltas = aiter(self._value(name))
        while (text := self._thread.run(_next(deltas))) is not None:
            yield text

    def text(self) -> str:
        """Everything so far, without the chat template's marks."""
        return self._thread.run(self._state.text())

    def messages(self) -> list[ChatMessage]:
        """Everything so far as chat turns; text outside of turns counts as a user's."""
        return self._thread.run(self._state.messages())

    def fork(self, count: int = 2) -> "SyncForks":
        """Children that share this state up to here. What is computed of it is computed once."""
        return SyncForks(self._thread, self._thread.call(lambda: self._state.fork(count)))

    def flush(self) -> None:
        """Send what waits for a gap now, so that it is computed while the program does other things."""
        self._thread.call(self._state.flush)

    def mark(self) -> Mark:
        """This place, for `rollback`."""
        return self._thread.call(self._state.mark)

    def rollback(self, mark: Mark) -> None:
        """Forget what was added since `mark`."""
        self._thread.call(lambda: self._state.rollback(mark))

    def finish(self) -> None:
        """Wait until everything added here is done. Raises what went wrong."""
        self._thread.run(self._state.finish())

    def apply(self, work: Callable[[AsyncState], Coroutine[Any, Any, T]]) -> T:
        """Run `work` on the asynchronous state, and wait for it."""
        return self._thread.run(work(self._state))

    def _value(self, name: str) -> Value:
        return self._thread.call(lambda: self._state[name])


class SyncForks(list[State]):
    """The children of a fork."""

    def __init__(self, thread: LoopThread, forks: Forks) -> None:
        super().__init__(State(thread, child) for child in forks)
        self._thread = thread
        self._forks = forks

    def values(self, name: str) -> list[str]:
        """What the gap `name` got in each child, in order."""
        return self._thread.run(self._forks.values(name))

    def finish(self) -> None:
        """Wait until every child is done."""
        self._thread.run(self._forks.finish())


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
