"""What a response says: items of its output while they are written, and the events that tell of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ramify.actors.gateway.apis.openai.dialogue import Vocabulary, ranked, text_parts
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Delta, Error, JsonObject, Part

EVEN = 16  # characters of each delta of a stream that can be told again, but for the last of an item
_TEXT = b'{"type":"response.output_text.delta","sequence_number":%d,%b,"delta":%b,"logprobs":[]%b'


class Events:
    """Numbers the events of a stream. `frame`: makes bytes to send of an event's name and its JSON.

    `fields`: what each event carries besides its own. `after`: the last one that the client has.
    """

    def __init__(
        self,
        frame: "Callable[[str, bytes], bytes] | None" = None,
        fields: JsonObject | None = None,
        after: int = -1,
    ) -> None:
        self._next = 0
        self.after = after
        self._frame = frame if frame is not None else server_sent
        self._fields = fields if fields is not None else {}
        self._more = b"," + msgspec.json.encode(self._fields)[1:] if self._fields else b"}"

    @property
    def last(self) -> int:
        """The number of the last event."""
        return self._next - 1

    def of(self, kind: str, **fields: Any) -> bytes:
        """Make the next event."""
        value = {"type": kind, "sequence_number": self._next, **self._fields, **fields}
        self._next += 1
        if self.last <= self.after:
            return b""
        return self._frame(kind, msgspec.json.encode(value))

    def broken(self, error: Error | RamifyError) -> bytes:
        """Tell why the stream breaks off, under the last number: the client may go on behind it."""
        fault = {"code": error.code, "message": error.message, "param": None}
        value = {"type": "error", "sequence_number": self.last, **fault}
        return self._frame("error", msgspec.json.encode(value))

    def text(self, where: bytes, text: str) -> bytes:
        """Write the commonest kind of event as `of` would, in a third of the time."""
        self._next += 1
        if self.last <= self.after:
            return b""
        data = _TEXT % (self.last, where, msgspec.json.encode(text), self._more)
        return self._frame("response.output_text.delta", data)


def server_sent(kind: str, data: bytes) -> bytes:
    """Make a server-sent event with its name."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class OutputItem(ABC):
    """An item of the output while it is written. `pieces`: of its text or arguments.

    `logprobs`: of its tokens, where they were asked for.
    """

    def __init__(self, index: int, ident: str) -> None:
        self.index = index
        self.ident = ident
        self.pieces: list[str] = []
        self.held = ""  # what no event has told
        self.logprobs: list[JsonObject] = []
        self.where = b""  # which part of which item, as JSON: made when it is first asked for

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @abstractmethod
    def shown(self, status: str) -> JsonObject:
        """Make the item's JSON, as far as it is written."""

    def opened(self, events: Events) -> bytes:
        item = self.shown("in_progress")
        return events.of("response.output_item.added", output_index=self.index, item=item)

    @abstractmethod
    def says(self, events: Events, text: str, logprobs: list[JsonObject]) -> bytes:
        """Add to its text or arguments. Returns the events."""

    def closed(self, events: Events, status: str) -> bytes:
        item = self.shown(status)
        return events.of("response.output_item.done", output_index=self.index, item=item)

    def _where(self) -> JsonObject:
        return {"item_id": self.ident, "output_index": self.index}


class MessageOutput(OutputItem):
    def shown(self, status: str) -> JsonObject:
        content = (
            [self._part(self.text, self.logprobs)] if self.pieces or status != "in_progress" else []
        )
        return {
            "id": self.ident,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def opened(self, events: Events) -> bytes:
        added = super().opened(events)
        part = self._part("", [])
        return added + events.of(
            "response.content_part.added", **self._where(), content_index=0, part=part
        )

    def says(self, events: Events, text: str, logprobs: list[JsonObject]) -> bytes:
        if not logprobs:
            if not self.where:
                self.where = msgspec.json.encode({**self._where(), "content_index": 0})[1:-1]
            return events.text(self.where, text)
        kind = "response.output_text.delta"
        return events.of(kind, **self._where(), content_index=0, delta=text, logprobs=logprobs)

    def closed(self, events: Events, status: str) -> bytes:
        where = {**self._where(), "content_index": 0}
        done = events.of("response.output_text.done", **where, text=self.text, logprobs=self.logprobs)
        done += events.of(
            "response.content_part.done", **where, part=self._part(self.text, self.logprobs)
        )
        return done + super().closed(events, status)

    @staticmethod
    def _part(text: str, logprobs: list[JsonObject]) -> JsonObject:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ThoughtOutput(OutputItem):
    def shown(self, status: str) -> JsonObject:
        content = [{"type": "reasoning_text", "text": self.text}] if self.pieces else []
        shown = {"id": self.ident, "type": "reasoning", "summary": [], "content": content}
        return {**shown, "status": status}

    def says(self, events: Events, text: str, logprobs: list[JsonObject]) -> bytes:
        kind = "response.reasoning_text.delta"
        return events.of(kind, **self._where(), content_index=0, delta=text)

    def closed(self, events: Events, status: str) -> bytes:
        kind = "response.reasoning_text.done"
        done = events.of(kind, **self._where(), content_index=0, text=self.text)
        return done + super().closed(events, status)


class CallOutput(OutputItem):
    def __init__(
        self, index: int, ident: str, call_id: str, name: str, namespace: str | None = None
    ) -> None:
        super().__init__(index, ident)
        self.call_id = call_id
        self.name = name
        self._spaced = {"namespace": namespace} if namespace is not None else {}

    def shown(self, status: str) -> JsonObject:
        return {
            "id": self.ident,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
            "status": status,
            **self._spaced,
        }

    def says(self, events: Events, text: str, logprobs: list[JsonObject]) -> bytes:
        kind = "response.function_call_arguments.delta"
        return events.of(kind, **self._where(), delta=text)

    def closed(self, events: Events, status: str) -> bytes:
        kind = "response.function_call_arguments.done"
        done = events.of(kind, **self._where(), arguments=self.text, name=self.name)
        return done + super().closed(events, status)


class OutputWriter:
    """Makes items of what is said on a branch, and the events that tell of them.

    `events`: None where no stream is told. `even`: each delta has `EVEN` characters, however the text
    came, so that a number means the same place whenever the stream is told; log-probabilities come
    with the end of their text then. `namespaces`: see `ResponseRequest`.
    """

    def __init__(
        self,
        unique: str,
        events: Events | None,
        vocabulary: Vocabulary = (),
        top: int = 0,
        namespaces: Mapping[str, tuple[str, str]] = {},
        *,
        even: bool = False,
    ) -> None:
        self.items: list[OutputItem] = []
        self._unique = unique
        self._events = events
        self._vocabulary = vocabulary
        self._top = top
        self._namespaces = namespaces
        self._even = even
        self._open: OutputItem | None = None

    def shown(self, status: str) -> list[JsonObject]:
        """Make the JSON of all items of an output that has ended with `status`."""
        return [
            item.shown("completed" if status == "completed" else "incomplete") for item in self.items
        ]

    def say(self, delta: Delta) -> bytes:
        """Add what a delta brings. Returns the events."""
        out = b""
        unsaid = [ranked(self._vocabulary, each, self._top) for each in delta.logprobs or ()]
        for part in text_parts(delta):
            text = part.arguments or "" if part.kind == "call" else part.text
            if part.kind == "call" and part.name is not None:
                out += self._switch(self._new_call(part))
            elif part.kind == "text" and not isinstance(self._open, MessageOutput):
                if isinstance(self._open, CallOutput) and not (text := text.lstrip()):
                    continue  # blanks between calls
                out += self._switch(MessageOutput(len(self.items), f"msg_{self._name()}"))
            elif part.kind == "reasoning" and not isinstance(self._open, ThoughtOutput):
                out += self._switch(ThoughtOutput(len(self.items), f"rs_{self._name()}"))
            if part.kind != "markup" and text and self._open is not None:
                self._open.pieces.append(text)
                logprobs: list[JsonObject] = []
                if isinstance(self._open, MessageOutput):
                    logprobs, unsaid = unsaid, []
                    self._open.logprobs += logprobs
                out += self._tell(self._open, text, logprobs)
        return out

    def end(self, *, completed: bool, spoken: bool = True) -> bytes:
        """End the output. `spoken`: an answer is a message, even if it is empty."""
        out = b""
        if spoken and not self.items:
            out += self._switch(MessageOutput(0, f"msg_{self._name()}"))
        return out + self._switch(None, "completed" if completed else "incomplete")

    def _tell(self, item: OutputItem, text: str, logprobs: list[JsonObject]) -> bytes:
        if self._events is None:
            return b""
        if not self._even:
            return item.says(self._events, text, logprobs)
        text = item.held + text
        whole = len(text) // EVEN * EVEN
        item.held = text[whole:]
        even = (text[at : at + EVEN] for at in range(0, whole, EVEN))
        return b"".join([item.says(self._events, piece, []) for piece in even])

    def _switch(self, item: OutputItem | None, status: str = "completed") -> bytes:
        """Close the item that is open, and open another one."""
        out, before, events = b"", self._open, self._events
        self._open = item
        if item is not None:
            self.items.append(item)
        if events is None:
            return out
        if before is not None and before.held:
            out += before.says(events, before.held, [])
        if before is not None:
            out += before.closed(events, status)
        return out + item.opened(events) if item is not None else out

    def _name(self) -> str:
        return f"{self._unique}{len(self.items)}"

    def _new_call(self, part: Part) -> CallOutput:
        told = part.name or ""
        namespace, name = self._namespaces.get(told, (None, told))
        return CallOutput(len(self.items), f"fc_{self._name()}", part.id or "", name, namespace)
