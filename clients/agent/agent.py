"""The loop: generate, run the tools that were called, give their results back, until there is an answer.

One step is one frame: the results (or the question) and the next generation. While tools run the
branch's KV is kept warm, softly (`retain_s`). However a run ends, the branch holds a result for each
call, so that it can be talked to at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Unpack

import msgspec

from ramify.clients.agent.calls import Approve, Called, Returned, Runner
from ramify.clients.agent.tools import Context, Tool, ToolCall
from ramify.clients.agent.transcript import Did, Said, Told, Transcript, result_message
from ramify.clients.branch import Branch, Messages, chat_messages
from ramify.clients.connect import Connecting, ConnectSettings, connect
from ramify.clients.generation import Result
from ramify.clients.options import GenerateOptions
from ramify.clients.program.steps import Backend
from ramify.clients.stream import TextDelta
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Append, Cancel, ChatMessage, Drop, Generate, Op, Set

Event = TextDelta | Called | Returned
Listener = Callable[[Event], None]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run.

    `text`: the last generation's, without thoughts and calls where the session tells them apart.
    `reason`: of the last generation's end; "steps" or "timeout" where the agent's limits ended the run.
    `results`: of all generations.
    """

    text: str
    reason: Literal["stop", "length", "tool", "cancelled", "deadline", "error", "steps", "timeout"]
    results: list[Result]
    transcript: Transcript

    @property
    def calls(self) -> list[Did]:
        """The tools that were called, with their results."""
        return [entry for entry in self.transcript.entries if isinstance(entry, Did)]


class Agent:
    """Tools, limits, and options for the model. Keeps nothing between runs: the branch has the history.

    `tools`: made with `tool`, or plain functions. `max_steps`: generations of a run. `timeout_s`: of a
    run; `tool_timeout_s`: of a call. `parallel`: calls that run at once. `approve(call)`: asked before a
    tool runs; what is not True is the reason why not, which the model hears. `retain_s`: how long the
    branch is kept warm behind its last call; None leaves that alone. `options`: of each generation.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]],
        *,
        max_steps: int = 8,
        timeout_s: float | None = None,
        tool_timeout_s: float | None = 60.0,
        approve: Approve | None = None,
        parallel: int = 8,
        retain_s: float | None = 300.0,
        **options: Unpack[GenerateOptions],
    ) -> None:
        """Raises ValueError for tools of one name, TypeError for a function that is no tool."""
        made = [each if isinstance(each, Tool) else Tool.of(each) for each in tools]
        self.tools = {each.name: each for each in made}
        if len(self.tools) < len(made):
            names = [each.name for each in made]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two tools are called {twice!r}")
        if max_steps < 1 or parallel < 1:
            raise ValueError("max_steps and parallel must be at least 1")
        self.max_steps = max_steps
        self.timeout_s = timeout_s
        self.retain_s = retain_s
        self.options = options
        self._runner = Runner(self.tools, timeout_s=tool_timeout_s, approve=approve, parallel=parallel)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' schemas, for `connect(tools=...)`."""
        return [each.schema for each in self.tools.values()]

    def connect(self, url: str, **settings: Unpack[ConnectSettings]) -> Connecting:
        """Connect to a session that knows these tools, and tells answer, thoughts and calls apart."""
        given: ConnectSettings = {"tools": self.schemas, "parts": True}
        given.update(settings)
        return connect(url, **given)

    # --- running -------------------------------------------------------------------------------

    async def run(
        self,
        branch: Branch,
        say: str | Messages | None = None,
        *,
        listener: Listener | None = None,
        tool_choice: str = "auto",
    ) -> Answer:
        """Append what is said, and go on until there is an answer without calls.

        `say`: a user's words, or messages; None goes on from what the branch holds. `tool_choice`: of
        the first generation. Raises what went wrong on the server; if this is cancelled, so are the
        generation and the tools that run.
        """
        ground = Ground(branch.session, branch.name, branch, branch.session.link.submit)
        return await self.run_on(ground, say, listener=listener, tool_choice=tool_choice)

    async def run_on(
        self,
        ground: "Ground",
        say: str | Messages | None,
        *,
        listener: Listener | None = None,
        tool_choice: str = "auto",
    ) -> Answer:
        """Run as `run` does, on a branch of any backend."""
        self._check(ground)
        run = _AgentRun(self, ground, listener or _nobody)
        messages = _messages(say)
        if messages:
            run.transcript.entries.append(Told(messages))
        time = asyncio.timeout(self.timeout_s)
        try:
            async with time:
                return await run.steps(messages, tool_choice)
        except TimeoutError:
            if not time.expired():
                raise
            return run.answer("timeout")

    async def stream(
        self, branch: Branch, say: str | Messages | None = None, *, tool_choice: str = "auto"
    ) -> AsyncIterator[Event | Answer]:
        """Run, and yield what happens: text, calls, results, and the `Answer` last.

        Close it (`aclose`) when you leave it early: that cancels the run.
        """
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        async def work() -> Answer:
            try:
                return await self.run(branch, say, listener=events.put_nowait, tool_choice=tool_choice)
            finally:
                events.put_nowait(None)

        task = asyncio.create_task(work(), name=f"agent {branch.name}")
        try:
            while (event := await events.get()) is not None:
                yield event
            yield await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def delegate(
        self, branch: Branch, tasks: Sequence[str], *, keep: bool = False
    ) -> list[Answer]:
        """Run each task on a fork of `branch`, all at once: sub-agents with the history up to here.

        `keep`: leave the forks; the first error ends them all.
        """
        session = branch.session
        names = session.fresh_names(branch.name, len(tasks))
        forks = await branch.fork(*names)
        runs = [asyncio.create_task(self.run(f, t)) for f, t in zip(forks, tasks, strict=True)]
        try:
            return list(await asyncio.gather(*runs))
        finally:
            for each in runs:
                each.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            if not keep and session.error is None:
                session.link.submit([Drop(id=0, branch=names)])

    def _check(self, ground: "Ground") -> None:
        """Raises ValueError if the model was not told of these tools."""
        names = ground.session.tool_names
        missing = [name for name in self.tools if name not in names]
        if missing:
            raise ValueError(
                f"the session does not know the tool {missing[0]!r}: open it with `agent.connect(url)`, "
                "`connect(url, tools=agent.schemas)`, or `ApiSession(..., tools=agent.schemas)`"
            )

    # --- for runs ------------------------------------------------------------------------------

    async def perform(
        self, calls: Sequence[Context], told: Callable[[Called | Returned], None], done: dict[str, Did]
    ) -> None:
        """Run the calls of one step. A replay does it otherwise."""
        await self._runner.run(calls, told, done)


class Tooled(Backend, Protocol):
    """A backend that knows its tools."""

    @property
    def error(self) -> RamifyError | None: ...
    @property
    def tool_names(self) -> list[str]: ...


class Ground(NamedTuple):
    """The branch that an agent runs on. `post`: sends ops without waiting for replies, which `warm`
    needs.

    `branch`: what its tools get as their context's branch.
    """

    session: Tooled
    name: str
    branch: Any
    post: Callable[[list[Op]], Any]


class _AgentRun:
    """One run on one branch."""

    def __init__(self, agent: Agent, ground: Ground, listener: Listener) -> None:
        self.transcript = Transcript()
        self._agent = agent
        self._ground = ground
        self._listener = listener
        self._results: list[Result] = []

    async def steps(self, messages: list[ChatMessage], tool_choice: str) -> Answer:
        for step in range(self._agent.max_steps):
            result = await self._generate(messages, tool_choice if step == 0 else "auto")
            calls = [ToolCall.of(call) for call in result.tool_calls or ()]
            if result.reason != "tool" or not calls:
                return self.answer(result.reason)
            if step + 1 == self._agent.max_steps:
                why = f"Error: not run: this was the last of {step + 1} steps"
                messages = self._close(calls, {}, why)
                for reply in await self._ground.session.send([self._append(messages)]):
                    await reply
                break
            messages = await self._perform(calls)
        return self.answer("steps")

    def answer(self, reason: Any) -> Answer:
        last = self._results[-1] if self._results else None
        text = "" if last is None else last.text if last.content is None else last.content
        return Answer(text=text, reason=reason, results=list(self._results), transcript=self.transcript)

    async def _generate(self, messages: list[ChatMessage], tool_choice: str) -> Result:
        ground = self._ground
        ops: list[Op] = [self._append(messages)] if messages else []
        options: GenerateOptions = {"tool_choice": tool_choice, **self._agent.options}
        generate = Generate(id=0, branch=ground.name, **options)
        *_, generation = await ground.session.send([*ops, generate])
        try:
            async for delta in generation:
                self._listener(delta)
            result: Result = await generation
        except asyncio.CancelledError:
            if (
                not ground.session.frames
            ):  # a Ramify session's generation is cancelled with who waits for it
                ground.post([Cancel(id=0, branch=ground.name)])
            raise
        self._results.append(result)
        calls = [ToolCall.of(call) for call in result.tool_calls or ()]
        self.transcript.entries.append(
            Said(
                result.text,
                result.reason,
                content=result.content,
                reasoning=result.reasoning,
                calls=calls,
                prompt=result.usage.prompt,
                cached=result.usage.cached,
                output=result.usage.output,
            )
        )
        return result

    async def _perform(self, calls: list[ToolCall]) -> list[ChatMessage]:
        """Run the calls. Returns the messages with their results."""
        ground, retain_s = self._ground, self._agent.retain_s
        if retain_s is not None and ground.session.frames:  # others keep no KV that they know of
            ground.post([Set(id=0, branch=ground.name, retain_s=retain_s)])
        done: dict[str, Did] = {}
        try:
            contexts = [Context(ground.branch, call) for call in calls]
            await self._agent.perform(contexts, self._listener, done)
        except BaseException:
            # The branch ends with calls: each gets its result, so that it can be talked to at once.
            messages = self._close(calls, done, "Error: cancelled")
            if ground.session.error is None:
                ground.post([self._append(messages)])
            raise
        return self._close(calls, done, "Error: not run")

    def _append(self, messages: list[ChatMessage]) -> Append:
        return Append(id=0, branch=self._ground.name, messages=messages)

    def _close(self, calls: list[ToolCall], done: dict[str, Did], otherwise: str) -> list[ChatMessage]:
        """Make the results of `calls` in their order; `otherwise` is the result of those without one."""
        entries = [done.get(call.id) or Did(call, otherwise, False) for call in calls]
        self.transcript.entries += entries
        return [result_message(entry.call, entry.text) for entry in entries]


def _messages(say: str | Messages | None) -> list[ChatMessage]:
    if say is None:
        return []
    return [ChatMessage(role="user", content=say)] if isinstance(say, str) else chat_messages(say)


def _nobody(event: Event) -> None:
    """The default listener: ignores events."""
