"""POST /v1/messages: from the request to ops, from deltas to events or one message."""

from collections.abc import Sequence

import msgspec

from ramify.actors.gateway.apis.anthropic.caching import CacheMarks
from ramify.actors.gateway.apis.anthropic.content import Content, event
from ramify.actors.gateway.apis.anthropic.conversation import RequestConversation
from ramify.actors.gateway.apis.anthropic.diagnostics import Divergence, RequestMark, RequestMarks
from ramify.actors.gateway.apis.anthropic.errors import fields_of_error, named, new_id, of_error
from ramify.actors.gateway.apis.anthropic.requests import CountRequest, MessagesRequest
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.actors.gateway.apis.openai.dialogue import Answers, text_parts
from ramify.actors.gateway.apis.openai.effort import ThinkingEffort
from ramify.actors.gateway.apis.openai.retention import Hinted, hinting, retaining
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.http import Response, json_response
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import InvalidField, RamifyError
from ramify.protocol.wire import (
    Append,
    ClientMessage,
    Delta,
    Done,
    Error,
    Generate,
    JsonObject,
    MessagePlace,
    Ok,
    Open,
    Part,
    ServerMessage,
    Set,
)

APPEND, UNTHOUGHT, PREFILL, GENERATE, HINTS, LEASES = range(1, 7)  # ids of the ops, which increase
_REASONS = {"tool": "tool_use", "length": "max_tokens", "deadline": "max_tokens"}


def opening(
    request: CountRequest,
    told: RequestConversation,
    served: Served,
    thinks: ThinkingEffort,
    marks: Sequence[MessagePlace] = (),
) -> list[ClientMessage]:
    """Make the ops that put the prompt on a branch. Raises InvalidField."""
    if not told.messages or told.messages[-1].role == "system":
        raise InvalidField("`messages` hold no user's turn before the answer: begin with one")
    try:
        opened = Open(
            detach="cancel",
            ttl_s=0.0,
            tools=request.declared(),
            effort=thinks.effort,
            parts=True,
            usage=True,
        )
    except InvalidField as error:  # of a schema that is no plain JSON
        raise InvalidField(error.message.replace(".function.parameters", ".input_schema")) from None
    turns = Append(id=APPEND, messages=told.messages, marks=list(marks), images=told.images)
    ops: list[ClientMessage] = [opened, turns]
    if request.thinking is not None and request.thinking.type == "disabled" and served.unthought != "":
        if served.unthought is None:
            raise InvalidField("`thinking`: this model cannot be kept from thinking: leave it out")
        ops.append(Append(id=UNTHOUGHT, text=served.unthought))
    if told.prefill:
        ops.append(Append(id=PREFILL, text=told.prefill, special=False))
    return ops


def ops_of(
    request: MessagesRequest, told: RequestConversation, served: Served, marks: CacheMarks
) -> list[ClientMessage]:
    """Make the frame of a request. Raises InvalidField."""
    thinks = request.thinks(request.max_tokens, served)
    ops = opening(request, told, served, thinks, marks.inner)
    kept = marks.retain_s
    ops[1:1] = retaining(kept)
    hints = hinting(HINTS, request.kv_hints, None if marks.inner else kept)
    if request.max_tokens == 0:  # one token that nobody sees computes the prompt
        return [*ops, Generate(id=GENERATE, max_tokens=1, hidden=True), *hints]
    choice = request.tool_choice
    generate = Generate(
        id=GENERATE,
        max_tokens=request.max_tokens,
        tool_choice=request.choice_of_tool,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        thought_tokens=thinks.tokens,
        constraint=request.constraint,
        **request.sampling(),
    )
    return [*ops, generate, *hints]


class MessageAnswers(Answers):
    """Answers POST /v1/messages (see `Dialogue`). `ident`: the request's. `marks`: see `diagnostics`."""

    def __init__(
        self,
        request: MessagesRequest,
        told: RequestConversation,
        signer: Signer,
        served: Served,
        ident: str,
        marks: RequestMarks | None = None,
        owner: str = "",
    ) -> None:
        self._marks = CacheMarks.of(request, told)
        ops = ops_of(request, told, served, self._marks)
        super().__init__(ops, ["main"], streams=bool(request.stream))
        self.pictures = told.places
        self._more: list[ClientMessage] = []
        if self._marks.inner and request.kv_hints is None:
            self._hints = Hinted(ops, due=LEASES, kept=self._marks.kept)
        thinking = request.thinking
        self._content = Content(
            signer,
            streams=self.streams,
            omits=thinking is not None and thinking.display == "omitted",
            held=_held(request),
        )
        self._most = request.max_tokens
        self._stops = request.stop_sequences or ()
        self._context = served.context
        self._ident = ident
        self._introduced = False
        self._head: JsonObject = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }
        self._divergence: Divergence | None = None
        if request.diagnostics is not None and marks is not None:
            self._diagnose(request, told, marks, owner)

    def _diagnose(
        self, request: MessagesRequest, told: RequestConversation, marks: RequestMarks, owner: str
    ) -> None:
        mark = RequestMark.of(told.messages, request.declared())
        previous = request.diagnostics.previous_message_id if request.diagnostics else None
        if previous is not None:
            before = marks.find(owner, previous)
            if before is None:
                self._divergence = Divergence("previous_message_not_found", 0.0)
            else:
                self._divergence = mark.diverges(before)
        marks.add(owner, self._head["id"], mark)

    def added(self, ok: Ok) -> bytes:
        if ok.id == APPEND and self._marks.inner:
            hints = self._marks.hints((ok.result or {}).get("marks") or [])
            self._more.append(Set(id=LEASES, branch="main", hints=hints))
        return b""

    def said(self, index: int, delta: Delta) -> bytes:
        out = b"".join(map(self._content.add, text_parts(delta)))
        if self._introduced or not self.streams:
            return out
        return self._introduce(delta.prompt or 0, delta.cached or 0) + out

    def ended(self, index: int, done: Done) -> bytes:
        told = self._content.calls
        out = b""
        for call in done.tool_calls or ():
            if call["id"] not in told:  # what was taken for text is a call
                out += self._content.add(_part(call))
        out += self._content.close()
        if not self.streams:
            return b""
        if not self._introduced:
            out = self._introduce(done.usage.prompt, done.usage.cached) + out
        ends = {"delta": self._end(done), "usage": self._usage(done)}
        return out + event("message_delta", **ends, **self.notes([done]))

    def last(self) -> bytes:
        return event("message_stop")

    def whole(self) -> Response:
        (done,) = self.done
        calls = {
            call["id"]: msgspec.json.decode(call["function"]["arguments"])
            for call in done.tool_calls or ()
        }
        message = {
            **self._head,
            **self._diagnosed(done.usage.prompt),
            "content": self._content.whole(calls),
            **self._end(done),
            "usage": self._usage(done),
            **self.notes([done]),
        }
        return msgspec.structs.replace(json_response(200, message), headers=named(self._ident))

    def refusal(self, error: Error | RamifyError) -> Response:
        return of_error(error, self._ident)

    def broken(self, error: Error | RamifyError) -> bytes:
        return event("error", **fields_of_error(error, self._ident))

    def _diagnosed(self, prompt: int) -> JsonObject:
        found = self._divergence
        return {"diagnostics": found.told(prompt)} if found is not None else {}

    def _introduce(self, prompt: int, cached: int) -> bytes:
        self._introduced = True
        message = {
            **self._head,
            **self._diagnosed(prompt),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": self._marks.usage(prompt, cached, 0),
        }
        return event("message_start", message=message) + event("ping")

    def _usage(self, done: Done) -> JsonObject:
        usage = done.usage
        output = usage.output if self._most else 0
        told = {
            **self._marks.usage(usage.prompt, usage.cached, output),
            "queue_ms": usage.queue_ms,
        }
        if usage.thought:
            told["output_tokens_details"] = {"thinking_tokens": usage.thought}
        return told

    def _end(self, done: Done) -> JsonObject:
        reason, sequence = _REASONS.get(done.reason, "end_turn"), None
        if done.reason == "stop" and done.stop in self._stops:
            reason, sequence = "stop_sequence", done.stop
        if done.reason == "length" and done.position >= self._context:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


class CountAnswers(Dialogue):
    """POST /v1/messages/count_tokens: the position of a branch with the prompt. See `Dialogue`."""

    def __init__(
        self, request: CountRequest, told: RequestConversation, served: Served, ident: str
    ) -> None:
        CacheMarks.of(request, told)
        self.ops = opening(request, told, served, request.thinks(None, served))
        self.pictures = told.places
        self._last = max(op.id for op in self.ops if isinstance(op, Append))
        self._ident = ident

    def receive(self, messages: Sequence[ServerMessage]) -> Response | None:
        """See `Dialogue`."""
        for message in messages:
            match message:
                case Ok() if message.id == self._last:
                    self.over = True
                    answer = json_response(200, {"input_tokens": message.position})
                    return msgspec.structs.replace(answer, headers=named(self._ident))
                case Error() if message.code != "skipped":
                    return self._fails(message)
        return None

    def _fails(self, error: Error | RamifyError) -> Response:
        self.over = True
        return of_error(error, self._ident)

    def fail(self, error: RamifyError) -> Response:
        """See `Dialogue`."""
        return self._fails(error)


def _held(request: CountRequest) -> frozenset[str]:
    """Find the tools whose input is to be sent in one piece."""
    tools = request.tools or ()
    return frozenset(tool.name for tool in tools if tool.name and tool.eager_input_streaming is False)


def _part(call: JsonObject) -> Part:
    function = call["function"]
    return Part(
        kind="call", text="", id=call["id"], name=function["name"], arguments=function["arguments"]
    )
