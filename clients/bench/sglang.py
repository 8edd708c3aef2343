"""SGLang's own `/generate`, streamed: https://docs.sglang.ai/basic_usage/sampling_params.html

Its events carry `output_ids` that are cumulative by default and increments with
`--incremental-streaming-output` (older: `--stream-output`); `meta_info.completion_tokens` is
cumulative always, and tells which.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.clients.bench.load_program import GenerateJob, Target
from ramify.clients.bench.session import BenchFailed, seen


class Finish(msgspec.Struct):
    """Why it ended: `type` is "length", "stop" or "abort"."""

    type: str
    message: str | None = None


class Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: Finish | None = None


class StreamEvent(msgspec.Struct):
    meta_info: Meta | None = None
    output_ids: msgspec.Raw = msgspec.Raw(b"[]")  # decoded only where needed: it may be long
    error: Any = None


_event = msgspec.json.Decoder(StreamEvent).decode
_ids = msgspec.json.Decoder(list[int]).decode
_encode = msgspec.json.Encoder().encode


class SglangDialect:
    """SGLang's API: see `history.ServerApi`."""

    path = "/generate"

    def __init__(self, target: Target) -> None:
        self._temperature = target.temperature

    def body(self, prompt: Sequence[int], job: GenerateJob, *, ids: bool) -> bytes:
        sampling = {
            "max_new_tokens": job.output,
            "temperature": self._temperature,
            "ignore_eos": True,
        }
        return _encode({"input_ids": prompt, "sampling_params": sampling, "stream": True})

    def answer(self, *, ids: bool) -> "SglangAnswer":
        return SglangAnswer(ids)


class SglangAnswer:
    """Reads an answer: see `history.AnswerReader`."""

    def __init__(self, want_ids: bool) -> None:
        self.prompt: int | None = None
        self.cached: int | None = None
        self.ids: list[int] = []
        self.finish: str | None = None
        self._want_ids = want_ids
        self._count = 0

    def event(self, data: bytes) -> int:
        try:
            event = _event(data)
            meta = event.meta_info
            if meta is None:
                raise BenchFailed(f"/generate: {seen(data)}")
            if self._want_ids:
                self._take(_ids(event.output_ids), meta.completion_tokens)
        except msgspec.DecodeError as error:
            raise BenchFailed(f"/generate: {error}: {seen(data)}") from None
        if self.finish is not None:
            raise BenchFailed("/generate: an event after the end")
        if meta.finish_reason is not None:
            self.finish = meta.finish_reason.type
            self.prompt, self.cached = meta.prompt_tokens, meta.cached_tokens
        new = meta.completion_tokens - self._count
        self._count = meta.completion_tokens
        return new

    def _take(self, ids: list[int], total: int) -> None:
        if len(ids) == total:
            self.ids = ids
        elif len(self.ids) + len(ids) == total:
            self.ids += ids
        else:
            raise BenchFailed(f"/generate: {len(ids)} ids after {len(self.ids)}, of {total} tokens")
