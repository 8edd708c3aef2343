"""POST /api/chat and /api/generate: from the request to ops, from deltas to lines of JSON."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from ramify.actors.gateway.apis.ollama.requests import GenerateRequest, OllamaChatRequest, pictured
from ramify.actors.gateway.apis.openai.dialogue import Answers, Vocabulary, ranked, text_parts
from ramify.actors.gateway.apis.openai.errors import status_and_body, told
from ramify.actors.gateway.apis.openai.retention import hinting, retaining, seconds_alive
from ramify.actors.gateway.apis.pictures import RequestPictures
from ramify.actors.gateway.port.http import Response, json_response
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Append, ClientMessage, Delta, Done, Error, Generate, JsonObject, Open

_REASONS = {"length": "length", "deadline": "length"}


def ops_of(
    request: OllamaChatRequest | GenerateRequest, served: Served, pictures: RequestPictures
) -> list[ClientMessage]:
    """Make the frame of a request. Raises InvalidField."""
    raw = isinstance(request, GenerateRequest) and bool(request.raw)
    tools = (request.tools or None) if isinstance(request, OllamaChatRequest) else None
    if isinstance(request, OllamaChatRequest):
        told = enumerate(request.messages or ())
        messages = [message.chat(pictures, f"messages[{number}]") for number, message in told]
        append = Append(id=1, messages=messages, images=pictures.images)
    elif raw:
        text = pictured(request.prompt or "", request.images, pictures, "")
        append = Append(id=1, text=text, images=pictures.images)
    else:
        append = Append(id=1, messages=request.messages(pictures), images=pictures.images)
    options, thinking = request.settings, request.thinking(served)
    kept = seconds_alive(request.keep_alive)
    return [
        Open(detach="cancel", ttl_s=0.0, tools=tools, effort=thinking.effort, parts=not raw),
        *retaining(kept),
        append,
        Generate(
            id=2,
            max_tokens=options.limit,
            logprobs=request.ranks,
            constraint=request.constraint,
            thought_tokens=None if raw else thinking.tokens,
            **options.sampling(),
        ),
        *hinting(3, request.kv_hints, kept),
    ]


class OllamaAnswers(Answers):
    """Answers POST /api/chat and /api/generate. See `Dialogue`."""

    def __init__(
        self,
        request: OllamaChatRequest | GenerateRequest,
        model: str,
        vocabulary: Vocabulary,
        served: Served,
    ) -> None:
        pictures = RequestPictures(served.pictures)
        super().__init__(
            ops_of(request, served, pictures), ["main"], streams=request.stream is not False
        )
        self.pictures = pictures.places
        self._chats = isinstance(request, OllamaChatRequest)
        self._model = model
        self._vocabulary = vocabulary
        self._top = request.top_logprobs or 0
        self._said: list[str] = []
        self._thought: list[str] = []
        self._logprobs: list[JsonObject] = []

    def said(self, index: int, delta: Delta) -> bytes:
        parts = text_parts(delta)
        text = "".join(part.text for part in parts if part.kind == "text")
        thought = "".join(part.text for part in parts if part.kind == "reasoning")
        logprobs = [ranked(self._vocabulary, each, self._top) for each in delta.logprobs or ()]
        if self.streams:
            return self._line(text, thought, logprobs) if text or thought or logprobs else b""
        self._said.append(text)
        self._thought.append(thought)
        self._logprobs += logprobs
        return b""

    def ended(self, index: int, done: Done) -> bytes:
        return b""

    def last(self) -> bytes:
        return msgspec.json.encode(self._whole("", "", [])) + b"\n"

    def whole(self) -> Response:
        text, thought = "".join(self._said), "".join(self._thought)
        return json_response(200, self._whole(text, thought, self._logprobs))

    def refusal(self, error: Error | RamifyError) -> Response:
        return of_error(error)

    def broken(self, error: Error | RamifyError) -> bytes:
        return msgspec.json.encode({"error": told(error)}) + b"\n"

    def _line(self, text: str, thought: str, logprobs: list[JsonObject]) -> bytes:
        body = {**self._head(), **self._speech(text, thought, []), "done": False}
        if logprobs:
            body["logprobs"] = logprobs
        return msgspec.json.encode(body) + b"\n"

    def _whole(self, text: str, thought: str, logprobs: list[JsonObject]) -> JsonObject:
        (done,) = self.done
        calls = [_call(call) for call in done.tool_calls or ()]
        body = {**self._head(), **self._speech(text, thought, calls), "done": True, **_counts(done)}
        return {**body, **({"logprobs": logprobs} if logprobs else {}), **self.notes([done])}

    def _speech(self, text: str, thought: str, calls: list[JsonObject]) -> JsonObject:
        more: JsonObject = {"thinking": thought} if thought else {}
        if not self._chats:
            return {"response": text, **more}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **more}}

    def _head(self) -> JsonObject:
        return {"model": self._model, "created_at": now_text()}


def loaded(request: OllamaChatRequest | GenerateRequest, model: str) -> Response:
    """Make the answer to a request without a prompt: the model is loaded."""
    speech: JsonObject = {"message": {"role": "assistant", "content": ""}}
    if isinstance(request, GenerateRequest):
        speech = {"response": ""}
    head = {"model": model, "created_at": now_text(), **speech}
    return json_response(200, {**head, "done": True, "done_reason": "load"})


def of_error(error: Error | RamifyError) -> Response:
    """Make the response for an error, as Ollama does: `error` is a text."""
    return json_response(status_and_body(error)[0], {"error": told(error)})


def now_text() -> str:
    """Return the time now, as `created_at` has it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _counts(done: Done) -> dict[str, Any]:
    """Make the counts of an answer. Times in nanoseconds; the wait in the queue counts as loading."""
    usage = done.usage
    waited, first = usage.queue_ms, usage.ttft_ms if usage.ttft_ms is not None else usage.total_ms
    return {
        "done_reason": _REASONS.get(done.reason, "stop"),
        "total_duration": int(usage.total_ms * 1e6),
        "load_duration": int(waited * 1e6),
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": int(max(0.0, first - waited) * 1e6),
        "eval_count": usage.output,
        "eval_duration": int(max(0.0, usage.total_ms - first) * 1e6),
        "queue_ms": waited,
    }


def _call(call: JsonObject) -> JsonObject:
    """Make a call. Its `arguments` are an object; what the model wrote otherwise is under `text`."""
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = {"text": arguments}
    if not isinstance(arguments, dict):
        arguments = {"text": str(arguments)}
    named = {"name": function.get("name", ""), "arguments": arguments}
    return {"id": call["id"], "function": named} if "id" in call else {"function": named}
