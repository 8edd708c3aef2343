"""The state of a branch over `api`, and the handles of its ops: a reply, a gap being filled."""

import asyncio
from collections.abc import Generator
from typing import Any, NamedTuple

from ramify.clients.generation import Result
from ramify.clients.program.expressions import TurnRole
from ramify.clients.stream import TextDelta
from ramify.protocol.wire import ChatMessage, Ok


class Segment(NamedTuple):
    """A part of a branch. `role` None: it goes on in the turn before, or is raw text.

    `message`: the turn with what is more than text of it (calls, the call that a result is of).
    """

    role: TurnRole | None
    text: str
    open: bool  # an assistant's turn that goes on
    message: ChatMessage | None = None


class ApiBranch:
    """A branch that is kept here. `position` counts its segments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.segments: list[Segment] = []
        self.guess = ""  # what the model said beyond the last gap
        self.answer: str | None = None  # what was generated last since it was forked
        self.ended = 0  # when, as a number that grows
        self.parent: str | None = None

    @property
    def position(self) -> int:
        return len(self.segments)

    @property
    def open(self) -> bool:
        """Whether an assistant's turn goes on at the end."""
        return bool(self.segments) and self.segments[-1].open

    def copy(self, name: str) -> "ApiBranch":
        branch = ApiBranch(name)
        branch.segments, branch.guess = list(self.segments), self.guess
        branch.parent = self.name
        return branch

    def moved(self, name: str) -> "ApiBranch":
        """Make a copy of this branch under another name."""
        branch = self.copy(name)
        branch.answer, branch.ended, branch.parent = self.answer, self.ended, self.parent
        return branch

    def answers(self, segment: Segment, number: int, *, hidden: bool = False) -> str:
        """Add what the model has said. Returns what of it is shown."""
        self.segments.append(segment)
        self.answer, self.ended = segment.text, number
        return "" if hidden else segment.text

    def cut(self, to: int) -> None:
        del self.segments[to:]
        self.guess = ""

    def follow(self, text: str, *, chat: bool) -> None:
        """Add text of the program: the guess holds as far as it says the same."""
        self.guess = self.guess.removeprefix(text) if self.guess.startswith(text) else ""
        answers = chat and bool(self.segments) and self.segments[-1].role in ("user", "tool")
        self.segments.append(Segment("assistant" if answers else None, text, answers or self.open))

    def text(self) -> str:
        """Return all text, for endpoints that know no turns."""
        return "".join(segment.text for segment in self.segments)

    def messages(self) -> list[dict[str, Any]]:
        """Make the messages for a chat endpoint: segments of one turn are one message."""
        joined: list[dict[str, Any]] = []
        for role, text, _, message in self.segments:
            if role is None and joined:
                joined[-1]["content"] = (joined[-1]["content"] or "") + text
            elif message is None:
                joined.append({"role": role or "user", "content": text})
            else:
                joined.append(_as_dict(message))
        return joined


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found |= {"tool_calls": message.tool_calls, "content": message.content or None}
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


class ApiReply:
    """The answer to an op without text."""

    def __init__(self, future: "asyncio.Future[Ok]") -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, list[Ok]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Ok]:
        return [await asyncio.shield(self._future)]


class ApiGeneration:
    """A gap that is being filled: awaitable for the `Result`, an async iterator of deltas."""

    def __init__(self, branch: str) -> None:
        self.branch = branch
        self.text = ""
        self._read = 0
        self._result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._result.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._more = asyncio.Event()

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        return await asyncio.shield(self._result)

    def __aiter__(self) -> "ApiGeneration":
        return self

    async def __anext__(self) -> TextDelta:
        while True:
            if len(self.text) > self._read:
                text, self._read = self.text[self._read :], len(self.text)
                return TextDelta(self.branch, 0, text)
            if self._result.done():
                self._result.result()
                raise StopAsyncIteration
            await self.progress()

    async def progress(self) -> None:
        """Wait until there is more of it."""
        if not self._result.done():
            self._more.clear()
            await self._more.wait()

    def add(self, text: str) -> None:
        self.text += text
        self._more.set()

    def end(self, result: Result | None, error: BaseException | None = None) -> None:
        if error is not None:
            self._result.set_exception(error)
        elif result is not None:
            self._result.set_result(result)
        self._more.set()
