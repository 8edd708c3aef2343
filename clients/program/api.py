r"""Programs over endpoints without branches: OpenAI's chat and plain completions.

    from openai import AsyncOpenAI
    session = ApiSession(AsyncOpenAI(), "gpt-4.1-mini", speculate=64)
    await profile.using(session=session).arun("Ada Lovelace")

A branch is text that is kept here and sent whole with each call, so a fork is a copy and its children
are independent requests.

Guessing ahead (section 5 of arXiv 2312.07104). The text between two gaps of one turn often follows a
pattern that the model has seen: "Name: ", gap, "\nBorn: ", gap. With `speculate`, a call does not stop
where its gap ends but goes on for that many tokens; the text beyond is a guess. If the program's own
text follows the guess word for word, and the next gap's stop string is in the rest, that gap needs no
call. Otherwise the guess is dropped. At temperature 0 the texts are those of one call each; only
`max_tokens` of a guessed gap is not enforced, because tokens are not counted here.
"""

import asyncio
import warnings
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import msgspec

from ramify.clients.generation import Result
from ramify.clients.program.api_branch import ApiBranch, ApiGeneration, ApiReply, Segment
from ramify.clients.program.api_calls import more_of, told, tool_choice
from ramify.clients.program.api_select import BEST, by_echo, by_next_tokens, next_tokens
from ramify.clients.program.api_tree import joined, pruned
from ramify.clients.program.expressions import TurnRole
from ramify.protocol.errors import BadRequest, NoBranch, RamifyError, Unsupported
from ramify.protocol.wire import (
    Append,
    Cancel,
    ChatMessage,
    Drop,
    Fork,
    Generate,
    Hit,
    Join,
    JsonObject,
    Ok,
    Op,
    Prune,
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


class ApiSession:
    """A program's session over an OpenAI client (`openai.AsyncOpenAI` or one like it).

    - `chat`: turns through `/chat/completions`; else raw text through `/completions`, and no turns.
    - `speculate`: tokens to ask for beyond a gap, 0: none.
    - `continues`: the endpoint continues an assistant's turn that it is given (`continue_final_message`
      of vLLM and SGLang).
    - `tools`: of OpenAI's shape, sent with each call (`agent.schemas`).
    - `calls`, `prompt_tokens`: used so far.
    """

    error: RamifyError | None = None
    frames = False  # a frame is of one branch

    def __init__(
        self,
        client: Any,
        model: str,
        *,
        chat: bool = True,
        speculate: int = 0,
        continues: bool = False,
        tools: Sequence[JsonObject] = (),
    ) -> None:
        """Raises BadRequest for tools without a chat."""
        if tools and not chat:
            raise BadRequest("this endpoint completes text: tools need ApiSession(chat=True)")
        self.tools = list(tools)
        self.calls = 0
        self.prompt_tokens = 0
        self._client = client
        self._model = model
        self._chat = chat
        self._speculate = speculate
        self._continues = continues
        self._branches: dict[str, ApiBranch] = {}
        self._count = 0
        self._answers = 0
        self._tasks: dict[asyncio.Task[None], str | None] = {}  # of which branch

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools that are sent."""
        return [str((tool.get("function") or tool).get("name")) for tool in self.tools]

    def fresh_names(self, parent: str, count: int) -> list[str]:
        """Make names for new branches."""
        first, self._count = self._count + 1, self._count + count
        return [f"{parent[-40:]}.{number}" for number in range(first, first + count)]

    def branch(self, name: str) -> ApiBranch:
        """Find a branch. Raises NoBranch."""
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
        self._start(work, ops)
        return handles

    def post(self, ops: Sequence[Op]) -> None:
        """Run ops that need no call, at once. Raises what is wrong with them."""
        for op in ops:
            self._apply(op)

    def _start(
        self, work: "list[tuple[Op, asyncio.Future[Ok] | ApiGeneration]]", ops: Sequence[Op]
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._run(work))
        branch = getattr(ops[0], "branch", None)
        self._tasks[task] = branch if isinstance(branch, str) else None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

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
            except (Exception, asyncio.CancelledError) as raised:
                failed = error = told(raised)
                if isinstance(handle, ApiGeneration):
                    handle.end(None, error)
                else:
                    handle.set_exception(error)

    # --- ops that need no call --------------------------------------------------------------------

    def _apply(self, op: Op) -> Ok:
        match op:
            case Append(images=[_, *_]):
                raise Unsupported("images are sent to a server of ours alone, not to another one's API")
            case Append(text=str(text)):
                self.branch(names(op.branch)[0]).follow(text, chat=self._chat)
            case Append(messages=list(messages)):
                if not self._chat:
                    raise BadRequest("this endpoint completes text: turns need ApiSession(chat=True)")
                branch = self.branch(names(op.branch)[0])
                branch.guess = ""
                branch.segments += [Segment(turn.role, turn.content, False, turn) for turn in messages]
            case Fork(branch=None, as_=made):
                self._branches.update((name, ApiBranch(name)) for name in made)
            case Fork(branch=str(source), as_=made):
                parent = self.branch(source)
                self._branches.update((name, parent.copy(name)) for name in made)
            case Rollback(to=int(to)):
                self.branch(op.branch).cut(to)
            case Join():
                target = self.branch(op.branch)
                text = joined(op, self._branches)
                if op.role is None:
                    target.follow(text, chat=self._chat)
                else:
                    turn = ChatMessage(role=op.role, content=text)
                    self._apply(Append(id=0, branch=op.branch, messages=[turn]))
            case Prune():
                return Ok(id=0, result=pruned(op, self._branches))
            case Cancel():
                self._cancel(names(op.branch) if op.branch is not None else None)
            case Drop():
                for name in names(op.branch):
                    self._branches.pop(name, None)
            case _:
                raise Unsupported(f"an endpoint without branches has no {type(op).__name__.lower()!r}")
        return Ok(id=0)

    def _cancel(self, roots: list[str] | None) -> None:
        """Stop the calls of these branches and of what was forked off them; None: all."""
        for task, name in list(self._tasks.items()):
            while roots is not None and name is not None and name not in roots:
                branch = self._branches.get(name)
                name = None if branch is None else branch.parent
            if task is not asyncio.current_task() and (roots is None or name is not None):
                task.cancel()

    # --- calls ------------------------------------------------------------------------------------

    async def _generate(self, op: Generate, generation: ApiGeneration) -> Result:
        branch = self.branch(generation.branch)
        refused = [field for field in _REFUSED if getattr(op, field)]
        if refused:
            raise Unsupported(f"an OpenAI endpoint has no {refused[0]!r}: leave it out")
        if op.tool_choice not in ("auto", "none") and not self.tools:
            raise BadRequest(f"`tool_choice` {op.tool_choice!r} needs tools: give ApiSession(tools=...)")
        text, stop, reason, usage, calls = await self._said(branch, op, generation)
        role: TurnRole | None = "assistant" if self._chat and not branch.open else None
        segment = Segment(role, text, self._chat and op.keep_open)
        if calls:
            turn = ChatMessage(role="assistant", content=text, tool_calls=calls)
            segment = Segment("assistant", text, False, turn)
        self._answers += 1
        shown = branch.answers(segment, self._answers, hidden=op.hidden)
        generation.add(shown[len(generation.text) :])
        result = _result(branch, shown, reason, stop, usage)
        return msgspec.structs.replace(result, reason="tool", tool_calls=calls) if calls else result

    async def _said(
        self, branch: ApiBranch, op: Generate, generation: ApiGeneration
    ) -> tuple[str, str | None, Reason, Usage | None, list[JsonObject]]:
        """Get an answer, guessed already or asked for: its text, stop, reason, usage and calls."""
        guessed = first_stop(branch.guess, op.stop)
        if guessed is not None:
            text, branch.guess = branch.guess[: guessed[0]], branch.guess[guessed[0] :]
            return text, guessed[1], "stop", None, []
        branch.guess = ""
        ahead = self._speculate if op.stop and (op.keep_open or not self._chat) else 0
        if ahead:
            said, reason, usage, calls = await self._call(branch, op, None, ahead)
            found = first_stop(said, op.stop)
            if found is not None:
                branch.guess = said[found[0] :]
                return said[: found[0]], found[1], "stop", usage, calls
            if reason != "length":
                return said if reason == "stop" else "", None, reason, usage, calls
        heard = None if op.hidden else generation  # neither its stop nor its end came in time
        text, reason, usage, calls = await self._call(branch, op, heard, 0)
        return text, None, reason, usage, calls

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
            prompt = branch.text()
            index, scores = await by_echo(prompt, op.choices, op.method, self._echo)
        text, branch.guess = op.choices[index], ""
        generation.add(text)
        role: TurnRole | None = "assistant" if self._chat and not branch.open else None
        self._answers += 1
        branch.answers(Segment(role, text, self._chat), self._answers)
        result = _result(branch, text, "stop", None, None)
        return msgspec.structs.replace(result, choice=index, scores=scores)

    async def _echo(self, prompts: list[str]) -> Sequence[Any]:
        """Ask for the prompts with their log-probabilities, and one token more: some refuse 0."""
        options = {"model": self._model, "max_tokens": 1, "echo": True, "logprobs": 1}
        completion = self._count_call(
            await self._client.completions.create(prompt=prompts, temperature=0, **options)
        )
        return sorted(completion.choices, key=lambda choice: choice.index)

    async def _next_tokens(self, branch: ApiBranch, said: str) -> dict[str, float]:
        """Ask for the most likely tokens behind `branch` and then `said`."""
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
    ) -> tuple[str, Reason, Any, list[JsonObject]]:
        """Make one request. Returns the whole text, the reason of its end, its usage, and tool calls.

        `generation` gets the text as it comes. With `ahead` the call is not stopped at the gap's end.
        """
        options: dict[str, Any] = {
            field: value for field in _PASSED if (value := getattr(op, field)) is not None
        }
        options |= {"max_tokens": op.max_tokens + ahead, "model": self._model, "stream": True}
        options["stream_options"] = {"include_usage": True}
        if op.stop and not ahead:
            options["stop"] = op.stop
        if self.tools and op.tool_choice != "none":
            options["tools"] = self.tools
            options["tool_choice"] = tool_choice(op.tool_choice)
        self.calls += 1
        said, usage = "", None
        calls: dict[int, JsonObject] = {}
        reason: Reason = "stop"
        async for piece in await self._request(branch, options):
            usage = piece.usage or usage
            for choice in piece.choices:
                text = (choice.delta.content if self._chat else choice.text) or ""
                said += text
                for piece_of in (getattr(choice.delta, "tool_calls", None) or ()) if self._chat else ():
                    more_of(calls, piece_of)
                if choice.finish_reason == "length":
                    reason = "length"
                if generation is not None:
                    generation.add(text)
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens
        whole = [calls[index] for index in sorted(calls)] if reason != "length" else []
        return said, reason, usage, whole

    async def _request(self, branch: ApiBranch, options: dict[str, Any]) -> AsyncIterator[Any]:
        if not self._chat:
            options["prompt"] = branch.text()
            return cast(AsyncIterator[Any], await self._client.completions.create(**options))
        options |= self._messages(branch)
        return cast(AsyncIterator[Any], await self._client.chat.completions.create(**options))

    def _messages(self, branch: ApiBranch) -> dict[str, Any]:
        """Make the messages of a branch, as a chat endpoint takes them."""
        options: dict[str, Any] = {}
        if branch.open:
            if not self._continues:
                raise Unsupported(
                    "this endpoint cannot go on in an assistant's turn: give continues=True if it can, "
                    "or begin each assistant's turn with its only gap"
                )
            options["extra_body"] = {"continue_final_message": True, "add_generation_prompt": False}
        options["messages"] = branch.messages()
        return options


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Find the position of the first stop string, and that string."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def _result(branch: ApiBranch, text: str, reason: Reason, stop: str | None, usage: Any) -> Result:
    """Make a result. `usage` None: the text was guessed in an earlier call."""
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
