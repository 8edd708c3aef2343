"""POST /v1/completions: raw text goes on, from one prompt or several.

With `echo` a choice begins with its prompt, and `logprobs` are those of the prompt's tokens too. With
`max_tokens` 0 nothing follows it. That is how likely a text is, as evaluation harnesses ask it.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ramify.actors.gateway.apis.openai.chat import FINISH, Heading
from ramify.actors.gateway.apis.openai.dialogue import (
    DONE,
    Answers,
    Vocabulary,
    count_tokens,
    event,
    word,
)
from ramify.actors.gateway.apis.openai.requests import CompletionRequest
from ramify.actors.gateway.apis.openai.retention import hinting
from ramify.actors.gateway.port.http import Response, json_response
from ramify.protocol.errors import InvalidField
from ramify.protocol.wire import (
    Append,
    ClientMessage,
    Delta,
    Done,
    Fork,
    Generate,
    Hit,
    JsonObject,
    Ok,
    Open,
    Usage,
)

DEFAULT_TOKENS = 16  # OpenAI's
FORK = 0  # id of the op that makes the roots of further prompts; ids increase


def ops_of(
    request: CompletionRequest, prompts: Sequence[str | list[int]]
) -> tuple[list[ClientMessage], list[str]]:
    """Make the frame of a request. Returns also the branch of each choice. Raises InvalidField."""
    ops: list[ClientMessage] = [Open(detach="cancel", ttl_s=0.0)]
    roots = ["main", *(f"prompt{i}" for i in range(1, len(prompts)))]
    if len(roots) > 1:
        ops.append(Fork(id=FORK, branch=None, as_=roots[1:]))
    branches: list[str] = []
    n = request.choices
    top = max(1, request.logprobs) if request.logprobs is not None else 0
    constraint = request.constraint()  # one for all prompts: it is checked, and as large as the body
    for i, (root, prompt) in enumerate(zip(roots, prompts, strict=True)):
        text = prompt if isinstance(prompt, str) else None
        tokens = None if isinstance(prompt, str) else prompt
        shown = top if request.echo else 0
        ops.append(Append(id=2 * i + 1, branch=root, text=text, tokens=tokens, logprobs=shown))
        names = [root] if n == 1 else [f"{root}.choice{j}" for j in range(n)]
        branches += names
        if request.max_tokens == 0:
            continue
        ops.append(
            Generate(
                id=2 * i + 2,
                branch=root,
                max_tokens=request.max_tokens or DEFAULT_TOKENS,
                logprobs=top,
                n=n,
                as_=None if n == 1 else names,
                constraint=constraint,
                **request.sampling(),
            )
        )
    if request.kv_hints is not None and len(prompts) > 1:
        raise InvalidField("`kv_hints` goes with one prompt")
    return [*ops, *hinting(3, request.kv_hints, None, branches[0])], branches


class _Entry(NamedTuple):
    """A token's log-probability, None where it stands behind nothing, and the likely tokens."""

    token: int
    logprob: float | None
    top: Sequence[Sequence[Any]]


class _CompletionChoice:
    """One answer, as far as it is generated."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.length = 0  # characters
        self.logprobs: list[_Entry] = []
        self.offsets: list[int] = []


class CompletionAnswers(Answers):
    """Answers POST /v1/completions. See `Dialogue`."""

    def __init__(self, request: CompletionRequest, heading: Heading, vocabulary: Vocabulary) -> None:
        prompts = request.prompts
        ops, branches = ops_of(request, prompts)
        super().__init__(ops, branches, streams=bool(request.stream))
        self._heading = heading
        self._vocabulary = vocabulary
        self._asked = request.logprobs
        self._each = request.choices
        options = request.stream_options
        self._usage = options is not None and options.include_usage
        self._choices = [_CompletionChoice() for _ in branches]
        self._echoed = prompts if request.echo else None
        self._generates = request.max_tokens != 0
        self._size = len(prompts)

    def said(self, index: int, delta: Delta) -> bytes:
        choice = self._choices[index]
        entries = [_Entry(each.token, each.logprob, each.top) for each in delta.logprobs or []]
        return self._say(index, delta.text, entries, [choice.length] * len(entries))

    def added(self, ok: Ok) -> bytes:
        """Echo a prompt that stands on its branch, and end its choices if nothing follows."""
        prompt = (ok.id - 1) // 2
        if ok.id % 2 == 0 or prompt >= self._size:
            return b""  # the roots were made
        out = b""
        for index in range(prompt * self._each, (prompt + 1) * self._each):
            if self._echoed is not None:
                out += self._echo(index, self._echoed[prompt], (ok.result or {}).get("logprobs", []))
            if not self._generates:
                out += self.end(index, _nothing_generated(ok))
        return out

    def _echo(self, index: int, prompt: "str | list[int]", scored: list[JsonObject]) -> bytes:
        """Echo a prompt. `scored`: its tokens, if their log-probabilities are wanted."""
        entries = [_Entry(each["token"], each["logprob"], each.get("top", ())) for each in scored]
        text = prompt
        if not isinstance(text, str):
            text = b"".join(map(self._bytes, text)).decode(errors="replace")
        # of each token, the characters that begin in it
        lengths = [sum(byte & 0xC0 != 0x80 for byte in self._bytes(each.token)) for each in entries]
        before = len(text) - sum(lengths)  # what begins every text is not in it
        ends = accumulate(lengths, initial=before)
        return self._say(index, text, entries, [max(0, end) for end in ends][: len(entries)])

    def _say(self, index: int, text: str, entries: list[_Entry], offsets: list[int]) -> bytes:
        choice = self._choices[index]
        choice.length += len(text)
        if self.streams:
            return self._chunk(index, text, None, self._logprobs(entries, offsets))
        choice.text.append(text)
        choice.logprobs += entries
        choice.offsets += offsets
        return b""

    def ended(self, index: int, done: Done) -> bytes:
        return self._chunk(index, "", FINISH.get(done.reason, "stop"), None) if self.streams else b""

    def last(self) -> bytes:
        usage = b""
        if self._usage:
            head = self._heading.of("text_completion")
            usage = event({**head, "choices": [], "usage": self._counted(), **self._hints.told})
        return usage + DONE

    def whole(self) -> Response:
        choices = [
            self._entry(
                i,
                "".join(self._choices[i].text),
                FINISH.get(done.reason, "stop"),
                self._logprobs(self._choices[i].logprobs, self._choices[i].offsets),
            )
            for i, done in enumerate(self.done)
        ]
        head = self._heading.of("text_completion")
        return json_response(
            200, {**head, "choices": choices, "usage": self._counted(), **self._hints.told}
        )

    def _counted(self) -> JsonObject:
        """Make `usage`, in which each prompt counts once."""
        usages = [done.usage for done in self.done]
        groups = [usages[i : i + self._each] for i in range(0, len(usages), self._each)]
        prompt = sum(group[0].prompt for group in groups)
        cached = sum(min(usage.cached for usage in group) for group in groups)
        return count_tokens(prompt, cached, usages)

    def _entry(
        self, index: int, text: str, finish: str | None, logprobs: JsonObject | None
    ) -> JsonObject:
        return {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}

    def _chunk(self, index: int, text: str, finish: str | None, logprobs: JsonObject | None) -> bytes:
        head = self._heading.of("text_completion")
        return event({**head, "choices": [self._entry(index, text, finish, logprobs)]})

    def _logprobs(self, entries: list[_Entry], offsets: list[int]) -> JsonObject | None:
        if self._asked is None:
            return None
        asked = self._asked
        top = [None if each.logprob is None else self._likely(each.top[:asked]) for each in entries]
        return {
            "tokens": [self._word(each.token) for each in entries],
            "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": top if asked else None,
            "text_offset": offsets,
        }

    def _likely(self, top: Sequence[Sequence[Any]]) -> JsonObject:
        """Make the likely tokens, likeliest first; of two with one spelling the likelier one."""
        found: JsonObject = {}
        for token, value in top:
            found.setdefault(self._word(token), value)
        return found

    def _word(self, token: int) -> str:
        return word(self._bytes(token))

    def _bytes(self, token: int) -> bytes:
        return self._vocabulary[token] if token < len(self._vocabulary) else b""


def _nothing_generated(ok: Ok) -> Done:
    """Make the end of a choice of which only the prompt was asked for."""
    prompt = ok.position or 0
    usage = Usage(
        prompt=prompt, cached=0, computed=prompt, output=0, forced=0, hit=Hit(gpu=0),
        queue_ms=0.0, ttft_ms=None, total_ms=0.0,
    )  # fmt: skip
    return Done(
        id=ok.id, branch=ok.branch or "", position=prompt, revision=ok.revision or 0, reason="length",
        usage=usage,
    )  # fmt: skip
