"""POST /v1/completions: raw text goes on, from one prompt or several."""

from ramify.actors.gateway.http import Response, json_response
from ramify.actors.gateway.openai.chat import FINISH, Heading
from ramify.actors.gateway.openai.dialogue import (
    DONE,
    Answers,
    Vocabulary,
    count_tokens,
    event,
    spelled,
)
from ramify.actors.gateway.openai.requests import CompletionRequest
from ramify.protocol.wire import (
    Append,
    ClientMessage,
    Delta,
    Done,
    Fork,
    Generate,
    JsonObject,
    Open,
    TokenLogprob,
)

DEFAULT_TOKENS = 16  # OpenAI's
FORK = 0  # id of the op that makes the roots of further prompts; ids increase


def ops_of(request: CompletionRequest) -> tuple[list[ClientMessage], list[str]]:
    """The frame of a request, and the branch of each choice. Raises InvalidField."""
    ops: list[ClientMessage] = [Open(detach="cancel", ttl_s=0.0)]
    prompts = request.prompts
    roots = ["main", *(f"prompt{i}" for i in range(1, len(prompts)))]
    if len(roots) > 1:
        ops.append(Fork(id=FORK, branch=None, as_=roots[1:]))
    branches: list[str] = []
    n = request.choices
    for i, (root, prompt) in enumerate(zip(roots, prompts, strict=True)):
        text = prompt if isinstance(prompt, str) else None
        tokens = None if isinstance(prompt, str) else prompt
        ops.append(Append(id=2 * i + 1, branch=root, text=text, tokens=tokens))
        names = [root] if n == 1 else [f"{root}.choice{j}" for j in range(n)]
        branches += names
        ops.append(
            Generate(
                id=2 * i + 2,
                branch=root,
                max_tokens=request.max_tokens or DEFAULT_TOKENS,
                logprobs=max(1, request.logprobs) if request.logprobs is not None else 0,
                n=n,
                as_=None if n == 1 else names,
                **request.sampling(),
            )
        )
    return ops, branches


class _Choice:
    """One answer, as far as it was said."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.length = 0  # characters
        self.logprobs: list[TokenLogprob] = []
        self.offsets: list[int] = []


class CompletionAnswers(Answers):
    """See `Dialogue`."""

    def __init__(self, request: CompletionRequest, heading: Heading, vocabulary: Vocabulary) -> None:
        ops, branches = ops_of(request)
        super().__init__(ops, branches, streams=bool(request.stream))
        self._heading = heading
        self._vocabulary = vocabulary
        self._asked = request.logprobs
        self._each = request.choices
        options = request.stream_options
        self._usage = options is not None and options.include_usage
        self._choices = [_Choice() for _ in branches]

    def said(self, index: int, delta: Delta) -> bytes:
        choice = self._choices[index]
        entries = delta.logprobs or []
        offsets = [choice.length] * len(entries)
        choice.length += len(delta.text)
        if self.streams:
            return self._chunk(index, delta.text, None, self._logprobs(entries, offsets))
        choice.text.append(delta.text)
        choice.logprobs += entries
        choice.offsets += offsets
        return b""

    def ended(self, index: int, done: Done) -> bytes:
        return self._chunk(index, "", FINISH.get(done.reason, "stop"), None) if self.streams else b""

    def last(self) -> bytes:
        usage = b""
        if self._usage:
            head = self._heading.of("text_completion")
            usage = event({**head, "choices": [], "usage": self._counted()})
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
        return json_response(200, {**head, "choices": choices, "usage": self._counted()})

    def _counted(self) -> JsonObject:
        """Each prompt counts once."""
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

    def _logprobs(self, entries: list[TokenLogprob], offsets: list[int]) -> JsonObject | None:
        if self._asked is None:
            return None
        asked = self._asked
        top = [{self._word(token): value for token, value in each.top[:asked]} for each in entries]
        return {
            "tokens": [self._word(each.token) for each in entries],
            "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": top if asked else None,
            "text_offset": offsets,
        }

    def _word(self, token: int) -> str:
        return str(spelled(self._vocabulary, token)["token"])
