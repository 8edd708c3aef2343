"""Programs over endpoints that know no branches: OpenAI's chat and plain completions.

    from openai import AsyncOpenAI
    session = ApiSession(AsyncOpenAI(), "gpt-4.1-mini", speculate=64)
    await profile.using(session=session).arun("Ada Lovelace")

A branch is text that is kept here and sent whole with each call, so a fork is a copy and its
children are independent requests.

Guessing ahead (section 5 of arXiv 2312.07104). Between two gaps of one turn stands text that the
model has usually seen the pattern of: "Name: ", gap, "\\nBorn: ", gap. With `speculate`, a call is not
stopped where its gap ends but goes on for so many tokens; what it says beyond is a guess. If the
program's own text follows the guess word for word, and the next gap's stop string is in what is
left, that gap needs no call. Otherwise the guess is forgotten. At temperature 0 the texts are those
of one call each; only `max_tokens` of a gap that was guessed is not enforced, for nobody here counts
tokens.
"""

import asyncio
import warnings
from collections.abc import AsyncIterator, Generator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgspec

from ramify.clients.generation import Result
from ramify.clients.program.api_select import BEST, by_echo, by_next_tokens, next_tokens
from ramify.clients.program.expressions import TurnRole
from ramify.clients.stream import TextDelta
from ramify.protocol.errors import BadRequest, NoBranch, RamifyError, Unsupported
from ramify.protocol.wire import (
    Append,
    Drop,
    Fork,
    Generate,
    Hit,
    Ok,
    Op,
    Rollback,
    Select,
    Usage,
    names,
)

Reason: TypeAlias = Literal["stop", "length"]
_PASSED = (  # fields of `generate` that endpoints know under the same name
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)
_REFUSED = ("constraint", "stop_token_ids", "deadline_ms", "top_k", "min_p", "repetition_penalty")


class Segment(NamedTuple):
    """A part of a branch. `role` None: it goes on in the turn before, or is raw text."""

    role: TurnRole | None
    text: str
    open: bool  # an assistant's turn that goes on


class ApiBranch:
    """A branch that is kept here. `position` counts its segments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.segments: list[Segment] = []
        self.guess = ""  # what the model said beyond the last gap

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
        return branch

    def cut(self, to: int) -> None:
        del self.segments[to:]
        self.guess = ""

    def follow(self, text: str, *, chat: bool) -> None:
        """The program's own text: the guess holds as far as it says the same."""
        self.guess = self.guess.removeprefix(text) if self.guess.startswith(text) else ""
        answers = chat and bool(self.segments) and self.segments[-1].role in ("user", "tool")
        self.segments.append(Segment("assistant" if answers else None, text, answers or self.open))

    def turns(self) -> list[tuple[TurnRole | None, str]]:
        """The segments, those of one turn joined."""
        joined: list[tuple[TurnRole | None, str]] = []
        for role, text, _ in self.segments:
            if role is None and joined:
                joined[-1] = joined[-1][0], joined[-1][1] + text
            else:
                joined.append((role, text))
        return joined


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


class ApiSession:
    """What a program needs of a session, over an OpenAI client (`openai.AsyncOpenAI` or one like it).

    `chat`: turns through `/chat/completions`; else raw text through `/completions`, and no turns.
    `speculate`: tokens to ask for beyond a gap, 0: none. `continues`: the endpoint goes on in an
    assistant's turn that it is given (`continue_final_message` of vLLM and SGLang).
    `calls`, `prompt_tokens`: what it took so far.
    """

    error: RamifyError | None = None

    def __init__(
        self,
        client: Any,
        model: str,
        *,
        chat: bool = True,
        speculate: int = 0,
        continues: bool = False,
    ) -> None:
        self.calls = 0
        self.prompt_tokens = 0
        self._client = client
        self._model = model
        self._chat = chat
        self._speculate = speculate
        self._continues = continues
        self._branches: dict[str, ApiBranch] = {}
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def fresh_names(self, parent: str, count: int) -> list[str]:
        """Names for new branches."""
        first, self._count = self._count + 1, self._count + count
        return [f"{parent[-40:]}.{number}" for number in range(first, first + count)]

    def branch(self, name: str) -> ApiBranch:
        """Raises NoBranch."""
        try:
            return self._branches[name]
        except KeyError:
            raise NoBranch(f"there is no branch {name!r}") from None

    async def send(self, ops: Sequence[Op]) -> list[ApiReply | ApiGeneration]:
        """Run ops of one branch in order; their handles tell how each ended."""
        loop = asyncio.get_running_loop()
        work: list[tuple[Op, asyncio.Future[Ok] | ApiGeneration]] = []
        handles: list[ApiReply | ApiGeneration] = []
        for op in ops:
            if isinstance(op, Generate | Select):
                generation = ApiGeneration(names(op.branch)[0])
                work.append((op, generation))
                handles.append(generation)
            else:
                future: asyncio.Future[Ok] = loop.create_future()
                future.add_done_callback(lambda done: done.cancelled() or done.exception())
                work.append((op, future))
                handles.append(ApiReply(future))
        task = loop.create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return handles

    async def _run(self, work: list[tuple[Op, "asyncio.Future[Ok] | ApiGeneration"]]) -> None:
        failed: BaseException | None = None
        for op, handle in work:
            try:
                if failed is not None:
                    raise failed
                if isinstance(handle, ApiGeneration):
                    assert isinstance(op, Generate | Select)
                    if isinstance(op, Select):
                        handle.end(await self._select(op, handle))
                    else:
                        handle.end(await self._generate(op, handle))
                else:
                    handle.set_result(self._apply(op))
            except (Exception, asyncio.CancelledError) as error:
                failed = error
                if isinstance(handle, ApiGeneration):
                    handle.end(None, error)
                else:
                    handle.set_exception(error)

    # --- ops that need no call --------------------------------------------------------------------

    def _apply(self, op: Op) -> Ok:
        match op:
            case Append(text=str(text)):
                self.branch(names(op.branch)[0]).follow(text, chat=self._chat)
            case Append(messages=list(messages)):
                if not self._chat:
                    raise BadRequest("this endpoint completes text: turns need ApiSession(chat=True)")
                branch = self.branch(names(op.branch)[0])
                branch.guess = ""
                branch.segments += [Segment(turn.role, turn.content, False) for turn in messages]
            case Fork(branch=None, as_=made):
                self._branches.update((name, ApiBranch(name)) for name in made)
            case Fork(branch=str(source), as_=made):
                parent = self.branch(source)
                self._branches.update((name, parent.copy(name)) for name in made)
            case Rollback(to=int(to)):
                self.branch(op.branch).cut(to)
            case Drop():
                for name in names(op.branch):
                    self._branches.pop(name, None)
            case _:
                raise Unsupported(f"an endpoint without branches has no {type(op).__name__.lower()!r}")
        return Ok(id=0)

    # --- calls ------------------------------------------------------------------------------------

    async def _generate(self, op: Generate, generation: ApiGeneration) -> Result:
        branch = self.branch(generation.branch)
        refused = [field for field in _REFUSED if getattr(op, field)]
        if refused:
            raise Unsupported(f"an OpenAI endpoint has no {refused[0]!r}: leave it out")
        text, stop, usage = "", None, None
        reason: Reason = "stop"
        guessed = first_stop(branch.guess, op.stop)
        if guessed is not None:
            at, stop = guessed
            text, branch.guess = branch.guess[:at], branch.guess[at:]
        else:
            branch.guess = ""
            ahead = self._speculate if op.stop and (op.keep_open or not self._chat) else 0
            if ahead:
                said, reason, usage = await self._call(branch, op, None, ahead)
                found = first_stop(said, op.stop)
                if found is not None:
                    at, stop = found
                    text, branch.guess, reason = said[:at], said[at:], "stop"
                elif reason == "stop":
                    text = said
            if not ahead or reason == "length":  # or neither its stop nor its end came in time
                text, reason, usage = await self._call(branch, op, generation, 0)
        generation.add(text[len(generation.text) :])
        role: TurnRole | None = "assistant" if self._chat and not branch.open else None
        branch.segments.append(Segment(role, text, self._chat and op.keep_open))
        return _result(branch, text, reason, stop, usage)

    async def _select(self, op: Select, generation: ApiGeneration) -> Result:
        branch = self.branch(generation.branch)
        if op.deadline_ms is not None:
            raise Unsupported("an OpenAI endpoint has no 'deadline_ms': leave it out")
        scores: list[float] | None = None
        if self._chat:
            if op.method != "greedy_token_selection":
                warnings.warn(
                    "a chat endpoint does not score given texts: `select` compares first tokens "
                    '("greedy_token_selection"); ApiSession(chat=False) may do more',
                    stacklevel=2,
                )
            index = await by_next_tokens(op.choices, partial(self._next_tokens, branch))
        else:
            prompt = "".join(text for _, text in branch.turns())
            index, scores = await by_echo(prompt, op.choices, op.method, self._echo)
        text, branch.guess = op.choices[index], ""
        generation.add(text)
        role: TurnRole | None = "assistant" if self._chat and not branch.open else None
        branch.segments.append(Segment(role, text, self._chat))
        result = _result(branch, text, "stop", None, None)
        return msgspec.structs.replace(result, choice=index, scores=scores)

    async def _echo(self, prompts: list[str]) -> Sequence[Any]:
        """The prompts with their log-probabilities, and one token more: 0 is refused by some."""
        options = {"model": self._model, "max_tokens": 1, "echo": True, "logprobs": 1}
        completion = self._count_call(
            await self._client.completions.create(prompt=prompts, temperature=0, **options)
        )
        return sorted(completion.choices, key=lambda choice: choice.index)

    async def _next_tokens(self, branch: ApiBranch, said: str) -> dict[str, float]:
        """The most likely tokens behind `branch` and then `said`."""
        at = branch.copy(branch.name)
        if said:
            role: TurnRole | None = None if branch.open else "assistant"
            at.segments.append(Segment(role, said, True))
        options = self._messages(at) | {"model": self._model, "max_tokens": 1}
        return next_tokens(
            self._count_call(
                await self._client.chat.completions.create(
                    logprobs=True, top_logprobs=BEST, temperature=0, **options
                )
            )
        )

    def _count_call(self, completion: Any) -> Any:
        self.calls += 1
        if completion.usage is not None:
            self.prompt_tokens += completion.usage.prompt_tokens
        return completion

    async def _call(
        self, branch: ApiBranch, op: Generate, generation: ApiGeneration | None, ahead: int
    ) -> tuple[str, Reason, Any]:
        """One request: the whole text, how it ended, and what it took.

        `generation` gets the text as it comes. With `ahead` the call is not stopped at the gap's end.
        """
        options: dict[str, Any] = {
            field: value for field in _PASSED if (value := getattr(op, field)) is not None
        }
        options |= {"max_tokens": op.max_tokens + ahead, "model": self._model, "stream": True}
        options["stream_options"] = {"include_usage": True}
        if op.stop and not ahead:
            options["stop"] = op.stop
        self.calls += 1
        said, usage = "", None
        reason: Reason = "stop"
        async for piece in await self._request(branch, options):
            usage = piece.usage or usage
            for choice in piece.choices:
                text = (choice.delta.content if self._chat else choice.text) or ""
                said += text
                if choice.finish_reason == "length":
                    reason = "length"
                if generation is not None:
                    generation.add(text)
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens
        return said, reason, usage

    async def _request(self, branch: ApiBranch, options: dict[str, Any]) -> AsyncIterator[Any]:
        if not self._chat:
            options["prompt"] = "".join(text for _, text in branch.turns())
            return cast(AsyncIterator[Any], await self._client.completions.create(**options))
        options |= self._messages(branch)
        return cast(AsyncIterator[Any], await self._client.chat.completions.create(**options))

    def _messages(self, branch: ApiBranch) -> dict[str, Any]:
        """The branch as a chat endpoint takes it."""
        options: dict[str, Any] = {}
        if branch.open:
            if not self._continues:
                raise Unsupported(
                    "this endpoint cannot go on in an assistant's turn: give continues=True if it can, "
                    "or begin each assistant's turn with its only gap"
                )
            options["extra_body"] = {"continue_final_message": True, "add_generation_prompt": False}
        options["messages"] = [
            {"role": role or "user", "content": text} for role, text in branch.turns()
        ]
        return options


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the stop strings begins, and which it is."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def _result(branch: ApiBranch, text: str, reason: Reason, stop: str | None, usage: Any) -> Result:
    """`usage` None: the text was guessed in an earlier call."""
    prompt = usage.prompt_tokens if usage is not None else 0
    details = getattr(usage, "prompt_tokens_details", None)
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Result(
        branch=branch.name,
        text=text,
        reason=reason,
        position=branch.position,
        stop=stop,
        usage=Usage(
            prompt=prompt,
            cached=cached,
            computed=prompt - cached,
            output=usage.completion_tokens if usage is not None else 0,
            forced=0,
            hit=Hit(gpu=cached),
            queue_ms=0.0,
            ttft_ms=None,
            total_ms=0.0,
        ),
    )
