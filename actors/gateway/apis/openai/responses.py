"""POST /v1/responses: a response is a branch of a session, which the next one forks.

The id of a response says where it is kept (`Stored`), so nothing else has to remember it, and any of
several gateway processes can find it. `previous_response_id` opens the session again and forks the
branch: only what is new is sent, tokenized and computed. The finished object is kept as the branch's
`meta`, for who fetches it later.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.actors.gateway.apis.openai.chat import NO_LIMIT
from ramify.actors.gateway.apis.openai.dialogue import Vocabulary, noted
from ramify.actors.gateway.apis.openai.errors import Refused, error_body, of_error
from ramify.actors.gateway.apis.openai.requests import sampling_of
from ramify.actors.gateway.apis.openai.response_output import Events, OutputWriter
from ramify.actors.gateway.apis.openai.response_requests import ResponseRequest, checksum
from ramify.actors.gateway.apis.openai.retention import Hinted, hinting, seconds_of
from ramify.actors.gateway.apis.pictures import RequestPictures
from ramify.actors.gateway.port.dialogues.dialogue import Dialogue
from ramify.actors.gateway.port.http import Response, json_response
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest, RamifyError
from ramify.protocol.stored_response import Stored, with_key
from ramify.protocol.wire import (
    Append,
    ClientMessage,
    CloseSession,
    Delta,
    Done,
    Drop,
    Error,
    Fork,
    Generate,
    JsonObject,
    Ok,
    Op,
    Open,
    ServerMessage,
    Set,
    StateReply,
    Usage,
)

# ids of the ops, which increase
FORK, SET, APPEND, BEGIN, WARM, GENERATE, HINTS, COOL, KEEP, KEEP_LESS, FORGET = range(1, 12)
IDS = ("id", "previous_response_id")  # of a response that hold a key
META = "response"  # the key under which a branch's `meta` holds the object
INPUT = "input"  # and the items that it answered, if both have room
KEPT = Limits().meta_bytes
UNDER_WAY = ("queued", "in_progress")


class ResponseDialogue(Dialogue):
    """Answers POST /v1/responses: see `Dialogue`. `created`: seconds since 1970.

    `events`: where the answer is written to if not to an HTTP stream: on a WebSocket. There a response
    that is not stored can be continued until its socket sends what `forget` says.
    """

    def __init__(
        self,
        request: ResponseRequest,
        model: str,
        created: int,
        vocabulary: Vocabulary = (),
        events: Events | None = None,
        *,
        known: Served = Served(),  # noqa: B008 - it is immutable
    ) -> None:
        """`known`: what is known of the model. Raises BadRequest."""
        if request.input is None and request.generates:
            raise BadRequest("missing parameter: `input`", details={"field": "input"})
        self.streams = bool(request.stream) or events is not None
        self.outlives = bool(request.background)
        self._transient = events is not None and not request.stores
        self._request = request
        self._model = model
        self._thinking = request.thinking(known)
        self._created = created
        self._unique = secrets.token_hex(6)
        self.branch = f"r{self._unique}"  # the response is all of it
        # Where nothing is to be said, one hidden token on a branch beside it computes the prompt.
        self._says = self.branch if request.generates else f"{self.branch}.warm"
        previous = self._previous()
        self.keeps = request.stores or previous is not None or self._transient
        self.saves = request.stores
        shown = RequestPictures(known.pictures, known.fetches)
        opening, *rest = self._all_ops(previous, shown)
        self.pictures = shown.places
        # In the background the object is kept before the generation begins, where its id is known: the
        # place of its output is a part of that.
        early = sum(isinstance(op, Op) and op.id < BEGIN for op in rest) if self.outlives else len(rest)
        self.ops, self._rest = [opening, *rest[:early]], rest[early:]
        self._more: list[ClientMessage] = []
        self._stored: Stored | None = None
        self._events = events if events is not None else Events()
        self._began = False
        self._answered = False
        self._output = OutputWriter(
            self._unique,
            self._events if self.streams else None,
            vocabulary,
            request.top_logprobs or 0,
            request.namespaces(),
            even=self.outlives,
        )
        self._done: Done | None = None
        self._hints = Hinted(rest)
        self._lost = False  # the finished object could not be kept
        self._kept: tuple[str, JsonObject | None] = ("", None)  # its status and error, when it was
        self._kept_input = False

    @property
    def ident(self) -> str | None:
        """The response's id, once its session is known."""
        return self._stored.ident if self._stored is not None else None

    @property
    def stores(self) -> bool:
        """Whether it can be continued when its socket has gone."""
        return self._request.stores

    @property
    def succeeded(self) -> bool:
        """Whether there is a response that can be continued."""
        return self.over and self._done is not None and self._done is not _FAILED

    def forget(self) -> list[ClientMessage]:
        """Make the ops that drop the branch of a response that cannot be continued."""
        return [Drop(id=FORGET, branch=self.branch)]

    def abandon(self) -> list[ClientMessage]:
        """See `Dialogue`."""
        if self._request.previous_response_id is None:
            return [CloseSession(id=FORGET)]  # nobody else has anything in it
        return self.forget()

    def receive(self, messages: Sequence[ServerMessage]) -> bytes | Response | None:
        """See `Dialogue`."""
        out: list[bytes] = []
        for message in self._hints.order(messages):
            if self.over:
                break
            match message:
                case StateReply() if self._stored is None:
                    self._attached(message)
                case Ok() if self._rest and message.id == _last(self.ops):
                    self._kept_first(message.position or 0)
                    if not self.streams:
                        self._answered = True
                        return json_response(200, self._object("queued"))
                    out.append(self._begin())
                case Delta() if message.branch == self.branch:
                    out += [self._begin(), self._output.say(message)]
                case Done(reason="error"):
                    failure = Error(code=message.error or "internal", message=message.message or "")
                    return self._fails(out, failure)
                case Done() if message.branch == self._says:
                    out.append(self._ended(message))
                case Error(id=9, code="limit") if self._kept_input:  # KEEP: no room for both
                    self._more.append(self._keep(KEEP_LESS, *self._kept, with_input=False))
                case Ok(id=4 | 9 | 10) | Error(id=4 | 9 | 10):  # BEGIN, KEEP, KEEP_LESS
                    self._lost = self._lost or isinstance(message, Error)
                    if message.id != BEGIN:
                        return self._complete(out)
                case Error() if message.code != "skipped":
                    return self._fails(out, message)
            if self._done is not None and not self._request.stores:
                return self._complete(out)
        return self._pieces(out)

    def fail(self, error: RamifyError) -> bytes | Response | None:
        """See `Dialogue`."""
        if self.outlives and self._began:  # it is not over: who comes back is told
            self.over = True
            return self._events.broken(error)
        return self._fails([], error)

    # --- what is asked ---

    def _previous(self) -> Stored | None:
        ident = self._request.previous_response_id
        if ident is None:
            return None
        previous = Stored.of(ident)
        if previous is None:
            raise previous_not_found(ident)
        asked = checksum(self._request.instructions)
        if asked and asked != previous.instructions:
            raise BadRequest(
                "`instructions` differ from those that the conversation began with: repeat them, "
                "leave them out, or send the conversation as `input`",
                details={"field": "instructions"},
            )
        return previous

    def _all_ops(self, previous: Stored | None, shown: RequestPictures) -> list[ClientMessage]:
        request, branch = self._request, self.branch
        detach = "run" if self.outlives else "cancel"
        opened = Open(
            session=previous.session if previous else None,
            key=previous.key if previous else None,
            detach=detach,  # type: ignore[arg-type]  # a literal
            ttl_s=0.0 if self._ephemeral(previous) else None,
            tools=request.declared(),
            effort=self._thinking.effort,
            parts=True,
        )
        from_ = previous.branch if previous else None
        instructed = previous is not None and bool(previous.instructions)
        self._instructions = previous.instructions if previous else checksum(request.instructions)
        ops: list[ClientMessage] = [opened, Fork(id=FORK, branch=from_, as_=[branch])]
        hides = previous is not None and not request.stores  # its session may be one that is saved
        kept = seconds_of(request.prompt_cache_retention, request.prompt_cache_key)
        hints = hinting(HINTS, request.kv_hints, kept, branch)
        if hides or kept:
            ops.append(Set(id=SET, branch=branch, persist="none" if hides else None, retain_s=kept))
        if messages := request.messages(instructed=instructed, pictures=shown):
            ops.append(Append(id=APPEND, branch=branch, messages=messages, images=shown.images))
        if not request.generates:
            warmed = Generate(id=GENERATE, branch=self._says, max_tokens=1, hidden=True)
            return [*ops, Fork(id=WARM, branch=branch, as_=[self._says]), warmed, *hints]
        return [
            *ops,
            Generate(
                id=GENERATE,
                branch=branch,
                max_tokens=request.max_output_tokens or NO_LIMIT,
                logprobs=request.ranks,
                tool_choice=request.choice_of_tool,
                parallel_tool_calls=request.parallel_tool_calls is not False,
                thought_tokens=self._thinking.tokens,
                constraint=request.constraint,
                priority=request.priority,
                **sampling_of(request),
            ),
            *hints,
        ]

    def _ephemeral(self, previous: Stored | None) -> bool:
        """Whether the session ends with its last socket: nothing in it is stored."""
        if self._request.stores:
            return False
        return previous is None or previous.transient

    def _attached(self, state: StateReply) -> None:
        key = state.key or (self.ops[0].key if isinstance(self.ops[0], Open) else None) or ""
        self._stored = Stored(state.session, key, self.branch, self._instructions, self._transient)

    def _kept_first(self, start: int) -> None:
        assert self._stored is not None
        self._stored = msgspec.structs.replace(self._stored, start=start)
        self._more += [self._keep(BEGIN, "in_progress"), *self._rest]
        self._rest = []

    def _keep(
        self, ident: int, status: str, error: JsonObject | None = None, *, with_input: bool = True
    ) -> Set:
        shown = keyed(self._object(status, error), "")
        kept = {META: shown if len(msgspec.json.encode({META: shown})) <= KEPT else _briefly(shown)}
        whole = {**kept, INPUT: self._request.items(self._unique)}
        self._kept = (status, error)
        self._kept_input = with_input and len(msgspec.json.encode(whole)) <= KEPT
        return Set(id=ident, branch=self.branch, meta=whole if self._kept_input else kept)

    # --- what is said ---

    def _begin(self) -> bytes:
        if self._began or not self.streams:
            return b""
        self._began = True
        return self._events.of(
            "response.created", response=self._object("in_progress")
        ) + self._events.of("response.in_progress", response=self._object("in_progress"))

    def _ended(self, done: Done) -> bytes:
        out = self._begin()
        self._done = done
        if not self._request.generates:
            self._more.append(Drop(id=COOL, branch=self._says))
        completed = done.reason in ("stop", "tool")
        out += self._output.end(completed=completed, spoken=self._request.generates)
        if self._request.stores:
            self._more.append(self._keep(KEEP, self._status(done)))
        elif not self._transient and self.keeps:
            self._more += self.forget()
        return out

    def _status(self, done: Done) -> str:
        return status_of(done.reason) if self._request.generates else "completed"

    def _complete(self, out: list[bytes]) -> bytes | Response | None:
        assert self._done is not None
        self.over = True
        failed = self._done is _FAILED  # in the background: that is kept
        status = "failed" if failed else self._status(self._done)
        if not self.streams:
            return None if self._answered else json_response(200, self._object(status))
        whole = self._object(status, self._kept[1] if failed else None)
        return b"".join(out) + self._events.of(end_of(status), response=whole)

    def _fails(self, out: list[bytes], error: Error | RamifyError) -> bytes | Response | None:
        """End with an error: a response of its own as long as nothing was sent, else an event."""
        if self._request.previous_response_id is not None and error.code in ("no_session", "no_branch"):
            error = previous_not_found(self._request.previous_response_id)
        shown = error_body(500, error.message, code="server_error")["error"]
        fault = {"code": shown["code"], "message": error.message}
        if self.outlives and (self._answered or self._began):  # who fetches it is told
            if self._done is None:
                self._more.append(self._keep(KEEP, "failed", fault))
                self._done = _FAILED
                return self._pieces([*out, self._output.end(completed=False, spoken=False)])
            return self._complete(out)
        self.over = True
        if not self.streams or (self._pieces(out) is None and not self._began):
            return of_error(error)
        failed = self._object("failed", fault)
        return b"".join(out) + self._events.of("response.failed", response=failed)

    def _pieces(self, out: list[bytes]) -> bytes | None:
        return b"".join(out) or None if self.streams else None

    def _object(self, status: str, error: JsonObject | None = None) -> JsonObject:
        request, done = self._request, self._done
        ended = status not in UNDER_WAY
        told = done if done is not _FAILED else None
        return {
            "id": self._stored.ident if self._stored is not None else "",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": self.outlives,
            "error": error,
            "incomplete_details": incompleteness(status),
            "model": self._model,
            "output": self._output.shown(status) if ended else [],
            **_asked(request),
            "store": request.stores and not self._lost,
            "usage": counted_tokens(told.usage) if told is not None else None,
            **(noted([told]) if told is not None else {}),
            **self._hints.told,
        }


def _asked(request: ResponseRequest) -> JsonObject:
    """Make the fields of a response object that repeat its request."""
    choice = request.tool_choice
    named = {"type": "function", "name": request.choice_of_tool}
    form = request.text.format if request.text is not None else None
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "temperature": request.temperature,
        "text": {"format": msgspec.to_builtins(form) if form is not None else {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else named if choice else "auto",
        "tools": [tool.shown() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": request.user,
        "metadata": request.metadata or {},
    }


def _briefly(shown: JsonObject) -> JsonObject:
    """Shorten a response object by what its client gave at length; the object says what that is."""
    left_out = ["instructions", "text.format", "tools"]
    form = {"format": {"type": shown["text"]["format"]["type"]}}
    tools = [_named(tool) for tool in shown["tools"]]
    return {**shown, "instructions": None, "text": form, "tools": tools, "ramify_left_out": left_out}


def _named(tool: JsonObject) -> JsonObject:
    names = {"type": tool["type"], "name": tool["name"], "description": ""}
    if "tools" in tool:
        return {**names, "tools": [_named(each) for each in tool["tools"]]}
    return {**names, "parameters": {}, "strict": tool["strict"]}


def keyed(response: JsonObject, key: str) -> JsonObject:
    """Put the session's key into the ids of a response. What is stored has none ("")."""
    ids = {name: response.get(name) for name in IDS}
    return {**response, **{n: with_key(i, key) for n, i in ids.items() if isinstance(i, str)}}


def previous_not_found(ident: str) -> Refused:
    """Make the error as OpenAI words it."""
    message = (
        f"the previous response with id {ident[:64]!r} is not kept here: it had `store: false`, was "
        "deleted, or its session has ended; send the conversation as `input`"
    )
    name = "previous_response_not_found"
    return Refused(400, message, param="previous_response_id", named=name)


def _last(ops: Sequence[ClientMessage]) -> int | None:
    last = ops[-1]
    return last.id if isinstance(last, Op) else None


def status_of(reason: str | None) -> str:
    """The status of a response whose generation ended for `reason`."""
    if reason in ("cancelled", "error"):
        return "failed" if reason == "error" else "cancelled"
    return "incomplete" if reason in ("length", "deadline") else "completed"


def incompleteness(status: str) -> JsonObject | None:
    """Make `incomplete_details`. A deadline is no reason that OpenAI knows."""
    return {"reason": "max_output_tokens"} if status == "incomplete" else None


def end_of(status: str) -> str:
    """The last event of a response that ended with `status`."""
    known = status if status in ("completed", "failed") else "incomplete"
    return f"response.{known}"


def counted_tokens(usage: Usage) -> JsonObject:
    """Make `usage` of a response."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.output,
        "queue_ms": usage.queue_ms,
    }


_FAILED: Any = object()
