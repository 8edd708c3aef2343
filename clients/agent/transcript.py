"""The transcript of an agent: what it was told, said and did, in order. It can be saved, read and
replayed.

A file is JSON lines, one for each entry. Knows no branch and no connection.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ramify.clients.agent.tools import ToolCall
from ramify.protocol.wire import ChatMessage


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The messages that began a turn."""

    messages: list[ChatMessage]


class Said(msgspec.Struct, frozen=True, tag="said", omit_defaults=True):
    """One generation. `text`: all of it; `content`: without thoughts and calls."""

    text: str
    reason: str
    content: str | None = None
    reasoning: str | None = None
    calls: list[ToolCall] = []
    prompt: int = 0
    cached: int = 0
    output: int = 0


class Did(msgspec.Struct, frozen=True, tag="did"):
    """One call of a tool, and its result. `ok`: it ran, and raised nothing."""

    call: ToolCall
    text: str
    ok: bool


Entry = Told | Said | Did
_DECODER = msgspec.json.Decoder(Entry)


class Transcript:
    """Entries in the order in which they happened; results of parallel calls in the calls' order."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: list[Entry] = list(entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transcript) and self.entries == other.entries

    def save(self, path: str | Path) -> None:
        """Write the transcript to a file."""
        lines = [msgspec.json.encode(entry) for entry in self.entries]
        Path(path).write_bytes(b"".join(line + b"\n" for line in lines))

    @staticmethod
    def load(path: str | Path) -> "Transcript":
        """Read a transcript. Raises ValueError that names the line."""
        entries: list[Entry] = []
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
            try:
                entries.append(_DECODER.decode(line))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
        return Transcript(entries)

    def messages(self) -> list[ChatMessage]:
        """Make the messages of the conversation, to append them to another branch."""
        out: list[ChatMessage] = []
        for entry in self.entries:
            match entry:
                case Told(messages):
                    out += messages
                case Said():
                    out.append(_assistant(entry))
                case Did(call, text):
                    out.append(result_message(call, text))
        return out


def result_message(call: ToolCall, text: str) -> ChatMessage:
    """Make the message that tells the model a call's result."""
    return ChatMessage(role="tool", content=text, name=call.name[:256], tool_call_id=call.id)


def _assistant(said: Said) -> ChatMessage:
    calls: list[dict[str, Any]] = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in said.calls
    ]
    content = said.text if said.content is None else said.content
    return ChatMessage(
        role="assistant", content=content, tool_calls=calls or None, reasoning=said.reasoning
    )
