"""OpenAI's `/v1/completions` with token ids as the prompt, streamed, as vLLM and others serve it.

Beyond OpenAI's own fields it sends `ignore_eos`, `stream_options.continuous_usage_stats` (each
chunk counts its tokens; without it a chunk is taken for one token, and the final usage must agree)
and, only where the output has to be sent again, `return_token_ids` (vLLM >= 0.10.2). No `seed`: what
is sampled does not matter, and some servers draw row by row for requests that have one.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.clients.bench.load_program import GenerateJob, Target
from ramify.clients.bench.session import BenchFailed, seen


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class CompletionUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: CompletionUsage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(Chunk).decode
_encode = msgspec.json.Encoder().encode


class OpenaiDialect:
    """OpenAI's API: see `history.ServerApi`.

    `target.url` is the server's root; the path begins with /v1.
    """

    path = "/v1/completions"

    def __init__(self, target: Target) -> None:
        if target.model is None:
            raise BenchFailed("which model? give --model NAME")
        self._model = target.model
        self._temperature = target.temperature

    def body(self, prompt: Sequence[int], job: GenerateJob, *, ids: bool) -> bytes:
        request: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": job.output,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if ids:
            request["return_token_ids"] = True
        return _encode(request)

    def answer(self, *, ids: bool) -> "OpenaiAnswer":
        return OpenaiAnswer()


class OpenaiAnswer:
    """Reads an answer: see `history.AnswerReader`."""

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.cached: int | None = None
        self.ids: list[int] = []
        self.finish: str | None = None
        self._count = 0

    def event(self, data: bytes) -> int:
        try:
            chunk = _chunk(data)
        except msgspec.DecodeError as error:
            raise BenchFailed(f"/v1/completions: {error}: {seen(data)}") from None
        if chunk.error is not None:
            raise BenchFailed(f"/v1/completions: {seen(data)}")
        new = 0
        for choice in chunk.choices:
            if self.finish is not None:
                raise BenchFailed("/v1/completions: a choice after the end")
            self.finish = choice.finish_reason
            if choice.token_ids is not None:
                self.ids += choice.token_ids
                new += len(choice.token_ids)
            elif choice.text or choice.finish_reason is None:
                new += 1
        if chunk.usage is not None:
            new = self._usage(chunk.usage, new if chunk.choices else 0, final=not chunk.choices)
        self._count += new
        return new

    def _usage(self, usage: CompletionUsage, guess: int, *, final: bool) -> int:
        """New tokens, by the server's count. Raises BenchFailed where the last one disagrees."""
        self.prompt = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached = usage.prompt_tokens_details.cached_tokens
        new = usage.completion_tokens - self._count
        if final and new != guess:
            raise BenchFailed(
                f"/v1/completions: {self._count} chunks held {usage.completion_tokens} tokens: the "
                "server puts several into one chunk and does not count them (continuous_usage_stats)"
            )
        return new
