"""POST /v1/responses: a response is a branch of a session, which the next one forks.

The id of a response says where it is kept (`Stored`), so nothing else has to remember it, and any of
several gateway processes can find it. `previous_response_id` opens the session again and forks the
branch: only what is new is sent, tokenized and computed. The finished object is kept as the branch's
`meta`, for who fetches it later.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.actors.gateway.http import Response, json_response
from ramify.actors.gateway.openai.chat import NO_LIMIT
from ramify.actors.gateway.openai.dialogue import text_parts
from ramify.actors.gateway.openai.errors import error_answer, error_body, of_error
from ramify.actors.gateway.openai.response_requests import ResponseRequest, Stored, checksum
from ramify.protocol.errors import BadRequest, RamifyError
from ramify.protocol.wire import (
    Append,
    Cancel,
    ClientMessage,
    Delta,
    Done,
    Drop,
    Error,
    Fork,
    Generate,
    JsonObject,
    Ok,
    Open,
    Part,
    ServerMessage,
    Set,
    State,
)

FORK, APPEND, BEGIN, GENERATE, KEEP = 1, 2, 3, 4, 5  # ids of the ops, which increase
META = "response"  # the key under which a branch's `meta` holds the object
_INCOMPLETE = {"length": "max_output_tokens", "deadline": "max_output_tokens"}


class Events:
    """Numbers the events of a stream."""

    def __init__(self) -> None:
        self._next = 0

    def of(self, kind: str, **fields: Any) -> bytes:
        """A server-sent event with its name."""
        value = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class _Item(ABC):
    """An item of the output while it is written. `pieces`: of its text or arguments."""

    def __init__(self, index: int, ident: str) -> None:
        self.index = index
        self.ident = ident
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @abstractmethod
    def shown(self, status: str) -> JsonObject:
        """What it looks like, as far as it is there."""

    def opened(self, events: Events) -> bytes:
        item = self.shown("in_progress")
        return events.of("response.output_item.added", output_index=self.index, item=item)

    @abstractmethod
    def says(self, events: Events, text: str) -> bytes:
        """More of its text or arguments."""

    def closed(self, events: Events, status: str) -> bytes:
        item = self.shown(status)
        return events.of("response.output_item.done", output_index=self.index, item=item)

    def _where(self) -> JsonObject:
        return {"item_id": self.ident, "output_index": self.index}


class _Message(_Item):
    def shown(self, status: str) -> JsonObject:
        content = [self._part(self.text)] if self.pieces or status != "in_progress" else []
        return {
            "id": self.ident,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def opened(self, events: Events) -> bytes:
        added = super().opened(events)
        part = self._part("")
        return added + events.of(
            "response.content_part.added", **self._where(), content_index=0, part=part
        )

    def says(self, events: Events, text: str) -> bytes:
        kind = "response.output_text.delta"
        return events.of(kind, **self._where(), content_index=0, delta=text, logprobs=[])

    def closed(self, events: Events, status: str) -> bytes:
        where = {**self._where(), "content_index": 0}
        done = events.of("response.output_text.done", **where, text=self.text, logprobs=[])
        done += events.of("response.content_part.done", **where, part=self._part(self.text))
        return done + super().closed(events, status)

    def _part(self, text: str) -> JsonObject:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Thought(_Item):
    def shown(self, status: str) -> JsonObject:
        content = [{"type": "reasoning_text", "text": self.text}] if self.pieces else []
        shown = {"id": self.ident, "type": "reasoning", "summary": [], "content": content}
        return {**shown, "status": status}

    def says(self, events: Events, text: str) -> bytes:
        kind = "response.reasoning_text.delta"
        return events.of(kind, **self._where(), content_index=0, delta=text)

    def closed(self, events: Events, status: str) -> bytes:
        kind = "response.reasoning_text.done"
        done = events.of(kind, **self._where(), content_index=0, text=self.text)
        return done + super().closed(events, status)


class _Call(_Item):
    def __init__(self, index: int, ident: str, call_id: str, name: str) -> None:
        super().__init__(index, ident)
        self.call_id = call_id
        self.name = name

    def shown(self, status: str) -> JsonObject:
        return {
            "id": self.ident,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
            "status": status,
        }

    def says(self, events: Events, text: str) -> bytes:
        kind = "response.function_call_arguments.delta"
        return events.of(kind, **self._where(), delta=text)

    def closed(self, events: Events, status: str) -> bytes:
        kind = "response.function_call_arguments.done"
        done = events.of(kind, **self._where(), arguments=self.text, name=self.name)
        return done + super().closed(events, status)


class ResponseDialogue:
    """See `Dialogue`. `created`: seconds since 1970."""

    def __init__(self, request: ResponseRequest, model: str, created: int) -> None:
        """Raises BadRequest."""
        self.streams = bool(request.stream)
        self.outlives = bool(request.background)
        self.over = False
        self._request = request
        self._model = model
        self._created = created
        self._unique = secrets.token_hex(6)
        self._branch = f"r{self._unique}"
        previous = self._previous()
        self.keeps = request.stores or previous is not None
        opening, *rest = self._all_ops(previous)
        # In the background the object is kept before the generation begins: only `State` says where.
        self.ops = [opening] if self.outlives else [opening, *rest]
        self._rest = rest
        self._more: list[ClientMessage] = []
        self._stored: Stored | None = None
        self._events = Events()
        self._began = False
        self._answered = False
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._done: Done | None = None
        self._lost = False  # the finished object could not be kept

    def take_ops(self) -> list[ClientMessage]:
        """See `Dialogue`."""
        more, self._more = self._more, []
        return more

    def receive(self, messages: Sequence[ServerMessage]) -> bytes | Response | None:
        """See `Dialogue`."""
        out: list[bytes] = []
        for message in messages:
            if self.over:
                break
            match message:
                case State() if self._stored is None:
                    self._attached(message)
                    if self.outlives:
                        self._answered = True
                        return json_response(200, self._object("queued"))
                case Delta() if message.branch == self._branch:
                    out.append(self._said(message))
                case Done(reason="error"):
                    failure = Error(code=message.error or "internal", message=message.message or "")
                    return self._fails(out, failure)
                case Done() if message.branch == self._branch:
                    out.append(self._ended(message))
                case Ok(id=3 | 5) | Error(id=3 | 5):
                    self._lost = self._lost or isinstance(message, Error)
                    if message.id == KEEP:
                        return self._complete(out)
                case Error() if message.code != "skipped":
                    return self._fails(out, message)
            if self._done is not None and not self._request.stores:
                return self._complete(out)
        return self._pieces(out)

    def fail(self, error: RamifyError) -> bytes | Response | None:
        """See `Dialogue`."""
        return self._fails([], error)

    # --- what is asked ---

    def _previous(self) -> Stored | None:
        ident = self._request.previous_response_id
        if ident is None:
            return None
        previous = Stored.of(ident)
        if previous is None:
            raise BadRequest(
                "`previous_response_id` is that of no response of this server",
                details={"field": "previous_response_id"},
            )
        asked = checksum(self._request.instructions)
        if asked and asked != previous.instructions:
            raise BadRequest(
                "`instructions` differ from those that the conversation began with: repeat them, "
                "leave them out, or send the conversation as `input`",
                details={"field": "instructions"},
            )
        return previous

    def _all_ops(self, previous: Stored | None) -> list[ClientMessage]:
        request, branch = self._request, self._branch
        detach = "run" if self.outlives else "cancel"
        tools = [tool.declared() for tool in request.tools or ()] or None
        opened = Open(
            session=previous.session if previous else None,
            key=previous.key if previous else None,
            detach=detach,  # type: ignore[arg-type]  # a literal
            ttl_s=None if self.keeps else 0.0,
            tools=tools,
            parts=True,
        )
        from_ = previous.branch if previous else None
        instructed = previous is not None and bool(previous.instructions)
        given: dict[str, Any] = {"temperature": request.temperature}
        if request.top_p is not None:
            given["top_p"] = max(request.top_p, 1e-20)
        self._instructions = previous.instructions if previous else checksum(request.instructions)
        return [
            opened,
            Fork(id=FORK, branch=from_, as_=[branch]),
            Append(id=APPEND, branch=branch, messages=request.messages(instructed=instructed)),
            Generate(
                id=GENERATE,
                branch=branch,
                max_tokens=request.max_output_tokens or NO_LIMIT,
                tool_choice=request.choice_of_tool,
                constraint=request.constraint,
                priority=request.priority,
                **{name: value for name, value in given.items() if value is not None},
            ),
        ]

    def _attached(self, state: State) -> None:
        key = state.key or (self.ops[0].key if isinstance(self.ops[0], Open) else None) or ""
        self._stored = Stored(state.session, key, self._branch, self._instructions)
        if self.outlives:
            *before, generate = self._rest
            self._more += [*before, self._keep(BEGIN, "in_progress"), generate]

    def _keep(self, ident: int, status: str, error: JsonObject | None = None) -> Set:
        kept = self._object(status, error)
        return Set(id=ident, branch=self._branch, meta={META: kept})

    # --- what is said ---

    def _begin(self) -> bytes:
        if self._began or not self.streams:
            return b""
        self._began = True
        return self._events.of(
            "response.created", response=self._object("in_progress")
        ) + self._events.of("response.in_progress", response=self._object("in_progress"))

    def _said(self, delta: Delta) -> bytes:
        out = self._begin()
        for part in text_parts(delta):
            if part.kind == "call" and part.name is not None:
                out += self._switch(self._new_call(part))
            elif part.kind == "text" and not isinstance(self._open, _Message):
                if isinstance(self._open, _Call) and not part.text.strip():
                    continue  # blanks between calls
                out += self._switch(_Message(len(self._items), f"msg_{self._name()}"))
            elif part.kind == "reasoning" and not isinstance(self._open, _Thought):
                out += self._switch(_Thought(len(self._items), f"rs_{self._name()}"))
            text = part.arguments if part.kind == "call" else part.text
            if part.kind != "markup" and text and self._open is not None:
                self._open.pieces.append(text)
                if self.streams:
                    out += self._open.says(self._events, text)
        return out

    def _name(self) -> str:
        return f"{self._unique}{len(self._items)}"

    def _new_call(self, part: Part) -> _Call:
        return _Call(len(self._items), f"fc_{self._name()}", part.id or "", part.name or "")

    def _switch(self, item: _Item | None, status: str = "completed") -> bytes:
        """Close the item that is open, and open another one."""
        out = b""
        if self._open is not None and self.streams:
            out += self._open.closed(self._events, status)
        self._open = item
        if item is not None:
            self._items.append(item)
            if self.streams:
                out += item.opened(self._events)
        return out

    def _ended(self, done: Done) -> bytes:
        out = self._begin()
        self._done = done
        if not self._items:  # nothing was said: an answer is a message all the same
            out += self._switch(_Message(0, f"msg_{self._name()}"))
        out += self._switch(None, "completed" if done.reason in ("stop", "tool") else "incomplete")
        if self._request.stores:
            self._more.append(self._keep(KEEP, self._status(done)))
        return out

    @staticmethod
    def _status(done: Done) -> str:
        if done.reason == "cancelled":
            return "cancelled"
        return "incomplete" if done.reason in _INCOMPLETE else "completed"

    def _complete(self, out: list[bytes]) -> bytes | Response | None:
        assert self._done is not None
        self.over = True
        if self._done is _FAILED:  # in the background: that is kept, and was answered long ago
            return None
        status = self._status(self._done)
        if not self.streams:
            return None if self._answered else json_response(200, self._object(status))
        kind = "response.incomplete" if status == "incomplete" else "response.completed"
        return b"".join(out) + self._events.of(kind, response=self._object(status))

    def _fails(self, out: list[bytes], error: Error | RamifyError) -> bytes | Response | None:
        """A response of its own as long as nothing was sent, else an event."""
        shown = error_body(500, error.message, code="server_error")["error"]
        fault = {"code": shown["code"], "message": error.message}
        if self._answered:  # it goes on in the background: who fetches it is told
            if self._done is None and self._stored is not None:
                self._more.append(self._keep(KEEP, "failed", fault))
                self._done = _FAILED
            else:
                self.over = True
            return None
        self.over = True
        if not self.streams or (self._pieces(out) is None and not self._began):
            return of_error(error)
        failed = self._object("failed", fault)
        return b"".join(out) + self._events.of("response.failed", response=failed)

    def _pieces(self, out: list[bytes]) -> bytes | None:
        return b"".join(out) or None if self.streams else None

    def _object(self, status: str, error: JsonObject | None = None) -> JsonObject:
        request, done = self._request, self._done
        ended = status not in ("queued", "in_progress")
        reason = _INCOMPLETE.get(done.reason) if done is not None and status == "incomplete" else None
        item = "completed" if status == "completed" else "incomplete"
        choice = request.tool_choice
        named = {"type": "function", "name": request.choice_of_tool}
        form = request.text.format if request.text is not None else None
        return {
            "id": self._stored.ident if self._stored is not None else "",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": self.outlives,
            "error": error,
            "incomplete_details": {"reason": reason} if reason is not None else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": [each.shown(item) for each in self._items] if ended else [],
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": request.stores and not self._lost,
            "temperature": request.temperature,
            "text": {"format": msgspec.to_builtins(form) if form is not None else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else named if choice else "auto",
            "tools": [tool.shown() for tool in request.tools or ()],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(done) if done is not None and done is not _FAILED else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }


def _usage(done: Done) -> JsonObject:
    usage = done.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.output,
    }


_FAILED: Any = object()


class StoredDialogue:
    """GET, DELETE and cancel of a response. `ask`: what it asks of the branch; None: only to see it."""

    streams = False
    outlives = False
    keeps = True

    def __init__(self, stored: Stored, ident: str, ask: "Cancel | Drop | None") -> None:
        self.ops: list[ClientMessage] = [Open(session=stored.session, key=stored.key)]
        if ask is not None:
            self.ops.append(ask)
        self.over = False
        self._branch = stored.branch
        self._ident = ident
        self._ask = ask
        self._object: JsonObject | None = None

    def take_ops(self) -> list[ClientMessage]:
        """See `Dialogue`."""
        return []

    def receive(self, messages: Sequence[ServerMessage]) -> Response | None:
        """See `Dialogue`."""
        for message in messages:
            match message:
                case State():
                    self._object = self._kept(message)
                    if self._object is None:
                        return self._answer(not_found(self._ident))
                    if self._ask is None:
                        return self._answer(json_response(200, self._object))
                case Ok() | Done() if self._object is not None:
                    return self._answer(self._done(self._object))
                case Error(code="no_session" | "no_branch"):
                    return self._answer(not_found(self._ident))
                case Error():
                    return self._answer(of_error(message))
        return None

    def fail(self, error: RamifyError) -> Response:
        """See `Dialogue`."""
        return self._answer(of_error(error))

    def _kept(self, state: State) -> JsonObject | None:
        for branch in state.branches:
            if branch.branch == self._branch:
                kept = (branch.meta or {}).get(META)
                return kept if isinstance(kept, dict) else None
        return None

    def _done(self, kept: JsonObject) -> Response:
        if isinstance(self._ask, Drop):
            return json_response(200, {"id": self._ident, "object": "response", "deleted": True})
        if kept.get("status") in ("queued", "in_progress"):
            kept = {**kept, "status": "cancelled"}
        return json_response(200, kept)

    def _answer(self, response: Response) -> Response:
        self.over = True
        return response


def not_found(ident: str) -> Response:
    """404: it was never kept, or is not any more."""
    message = (
        f"the response {ident[:64]!r} is not kept here: it had `store: false`, was too long to be "
        "kept, was deleted, or its session has ended"
    )
    return error_answer(404, message, code="response_not_found")
