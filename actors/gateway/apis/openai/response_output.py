"""What a response says: items of its output while they are written, and the events that tell of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from ramify.protocol.wire import JsonObject

_TEXT = b'{"type":"response.output_text.delta","sequence_number":%d,%b,"delta":%b,"logprobs":[]%b'


class Events:
    """Numbers the events of a stream. `frame`: makes bytes to send of an event's name and its JSON.

    `fields`: what each event carries besides its own.
    """

    def __init__(
        self, frame: "Callable[[str, bytes], bytes] | None" = None, fields: JsonObject | None = None
    ) -> None:
        self._next = 0
        self._frame = frame if frame is not None else server_sent
        self._fields = fields if fields is not None else {}
        self._more = b"," + msgspec.json.encode(self._fields)[1:] if self._fields else b"}"

    def of(self, kind: str, **fields: Any) -> bytes:
        """The next event."""
        value = {"type": kind, "sequence_number": self._next, **self._fields, **fields}
        self._next += 1
        return self._frame(kind, msgspec.json.encode(value))

    def text(self, where: bytes, text: str) -> bytes:
        """The event that almost all are, as `of` would write it, in a third of the time."""
        data = _TEXT % (self._next, where, msgspec.json.encode(text), self._more)
        self._next += 1
        return self._frame("response.output_text.delta", data)


def server_sent(kind: str, data: bytes) -> bytes:
    """A server-sent event with its name."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class OutputItem(ABC):
    """An item of the output while it is written. `pieces`: of its text or arguments.

    `logprobs`: of its tokens, where they were asked for.
    """

    def __init__(self, index: int, ident: str) -> None:
        self.index = index
        self.ident = ident
        self.pieces: list[str] = []
        self.logprobs: list[JsonObject] = []
        self.where = b""  # which part of which item, as JSON: made when it is first asked for

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @abstractmethod
    def shown(self, status: str) -> JsonObject:
        """The item as JSON, as far as it is written."""

    def opened(self, events: Events) -> bytes:
        item = self.shown("in_progress")
        return events.of("response.output_item.added", output_index=self.index, item=item)

    @abstractmethod
    def says(self, events: Events, text: str, logprobs: list[JsonObject]) -> bytes:
        """More of its text or arguments."""

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
