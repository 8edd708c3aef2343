"""POST /v1/chat/completions: from the request to ops, from deltas to chunks or one answer."""

import msgspec

from ramify.actors.gateway.apis.openai.dialogue import (
    DONE,
    Answers,
    Vocabulary,
    counted,
    event,
    ranked,
    text_parts,
)
from ramify.actors.gateway.apis.openai.requests import ChatRequest, chat_of
from ramify.actors.gateway.apis.openai.retention import hinting, retaining, seconds_of
from ramify.actors.gateway.apis.pictures import RequestPictures
from ramify.actors.gateway.port.http import Response, json_response
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.wire import Append, ClientMessage, Delta, Done, Generate, JsonObject, Open, Part

FINISH = {"stop": "stop", "length": "length", "tool": "tool_calls", "deadline": "length"}
NO_LIMIT = 2**31 - 1  # tokens: what the context has room for


_QUICK_END = b'},"finish_reason":null,"logprobs":null}]}\n\n'


class Heading(msgspec.Struct, frozen=True):
    """The first fields of every object of one answer. `created`: seconds since 1970."""

    ident: str
    created: int
    model: str

    def of(self, kind: str) -> JsonObject:
        return {"id": self.ident, "object": kind, "created": self.created, "model": self.model}


def ops_of(
    request: ChatRequest, served: Served, pictures: RequestPictures
) -> tuple[list[ClientMessage], list[str]]:
    """Make the frame of a request. Returns also the branch of each choice. Raises InvalidField."""
    tools = request.tools if request.tools else None
    choices, thinking = request.choices, request.thinking(served)
    branches = ["main"] if choices == 1 else [f"choice{i}" for i in range(choices)]
    kept = seconds_of(request.prompt_cache_retention, request.prompt_cache_key)
    return [
        Open(detach="cancel", ttl_s=0.0, tools=tools, effort=thinking.effort, parts=True),
        *retaining(kept),
        Append(id=1, messages=chat_of(request.messages, pictures), images=pictures.images),
        Generate(
            id=2,
            max_tokens=request.limit or NO_LIMIT,
            logprobs=max(1, request.top_logprobs or 0) if request.logprobs else 0,
            n=choices,
            as_=None if choices == 1 else branches,
            tool_choice=request.choice_of_tool,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            thought_tokens=thinking.tokens,
            constraint=request.constraint(),
            **request.sampling(),
        ),
        *hinting(3, request.kv_hints, kept, branches[0]),
    ], branches


class _Choice:
    """One answer, as far as it is generated."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.logprobs: list[JsonObject] = []
        self.introduced = False
        self.head = b""  # of a chunk with text, up to the text


class ChatAnswers(Answers):
    """Answers POST /v1/chat/completions. See `Dialogue`."""

    def __init__(
        self,
        request: ChatRequest,
        heading: Heading,
        vocabulary: Vocabulary,
        served: Served = Served(),  # noqa: B008 - it is immutable
    ) -> None:
        pictures = RequestPictures(served.pictures, served.fetches)
        ops, branches = ops_of(request, served, pictures)
        self.pictures = pictures.places
        super().__init__(ops, branches, streams=bool(request.stream))
        self._heading = heading
        self._vocabulary = vocabulary
        self._logprobs = bool(request.logprobs)
        self._top = request.top_logprobs or 0
        options = request.stream_options
        self._usage = options is not None and options.include_usage
        self._choices = [_Choice() for _ in branches]

    def said(self, index: int, delta: Delta) -> bytes:
        choice = self._choices[index]
        if self.streams and choice.introduced and not delta.logprobs:
            parts = text_parts(delta)
            if len(parts) == 1 and parts[0].kind == "text":
                return self._quick(index, parts[0].text)
        entries = [ranked(self._vocabulary, each, self._top) for each in delta.logprobs or ()]
        pieces: list[JsonObject] = []
        for part in text_parts(delta):
            if part.kind == "text":
                pieces.append({"content": part.text})
                choice.content.append(part.text)
            elif part.kind == "reasoning":
                pieces.append({"reasoning_content": part.text})
                choice.reasoning.append(part.text)
            elif part.kind == "call" and (part.name or part.arguments):
                pieces.append({"tool_calls": [_call_piece(part)]})
        if not self.streams:
            choice.logprobs += entries
            return b""
        if entries and not pieces:
            pieces.append({})  # tokens that have no text of their own yet
        return b"".join(
            self._chunk(index, piece, logprobs=entries if i == 0 else [])
            for i, piece in enumerate(pieces)
        )

    def ended(self, index: int, done: Done) -> bytes:
        if not self.streams:
            return b""
        return self._chunk(index, {}, finish=FINISH.get(done.reason, "stop"), more=self.notes([done]))

    def last(self) -> bytes:
        usage = b""
        if self._usage:
            head = self._heading.of("chat.completion.chunk")
            whole = {**head, "choices": [], "usage": counted(self.done), **self.notes(self.done)}
            usage = event(whole)
        return usage + DONE

    def whole(self) -> Response:
        choices = [self._choice(i, done) for i, done in enumerate(self.done)]
        head = self._heading.of("chat.completion")
        body = {**head, "choices": choices, "usage": counted(self.done)}
        return json_response(200, {**body, **self.notes(self.done)})

    def _quick(self, index: int, text: str) -> bytes:
        """Write the commonest kind of chunk as `_chunk` would, in a sixth of the time."""
        head = self._choices[index].head
        if not head:
            chunk = msgspec.json.encode(self._heading.of("chat.completion.chunk"))[:-1]
            head = b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (chunk, index)
            self._choices[index].head = head
        return head + msgspec.json.encode(text) + _QUICK_END

    def _choice(self, index: int, done: Done) -> JsonObject:
        said = self._choices[index]
        calls = done.tool_calls
        content = "".join(said.content)
        message: JsonObject = {
            "role": "assistant",
            "content": content if content.strip() or not calls else None,
            "refusal": None,
        }
        if said.reasoning:
            message["reasoning_content"] = "".join(said.reasoning)
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": said.logprobs, "refusal": None} if self._logprobs else None,
            "finish_reason": FINISH.get(done.reason, "stop"),
        }

    def _chunk(
        self,
        index: int,
        delta: JsonObject,
        *,
        logprobs: list[JsonObject] | None = None,
        finish: str | None = None,
        more: JsonObject | None = None,
    ) -> bytes:
        choice = self._choices[index]
        if not choice.introduced:
            choice.introduced = True
            delta = {"role": "assistant", "content": "", **delta}
        entry: JsonObject = {"index": index, "delta": delta, "finish_reason": finish}
        entry["logprobs"] = {"content": logprobs, "refusal": None} if logprobs else None
        head = self._heading.of("chat.completion.chunk")
        return event({**head, "choices": [entry], **(more or {})})


def _call_piece(part: Part) -> JsonObject:
    """Make a piece of a call: its id and name come once, its arguments piece by piece."""
    function: JsonObject = {"arguments": part.arguments or ""}
    piece: JsonObject = {"index": part.call or 0, "function": function}
    if part.name is not None:
        function["name"] = part.name
        piece |= {"id": part.id, "type": "function"}
    return piece
