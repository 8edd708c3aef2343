"""The content of an answer, block by block, as events of a stream and as the list of a whole answer.

Blocks follow each other. Blanks that would begin a text or a thought wait for what follows them: a block
of blanks alone is refused when a client sends it back.
"""

import msgspec

from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.protocol.wire import JsonObject, Part

_HEADS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


def event(kind: str, **fields: object) -> bytes:
    """Make a server-sent event of this API."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class _Block:
    """A block, as far as it is generated. `head`: the JSON of its deltas, up to their text."""

    def __init__(self, index: int, kind: str, opened: JsonObject) -> None:
        self.kind = kind
        self.opened = opened
        self.pieces: list[str] = []
        delta = f'"delta":{{"type":"{_HEADS[kind]}","{_FIELDS[kind]}":'
        data = f'{{"type":"content_block_delta","index":{index},{delta}'
        self.head = f"event: content_block_delta\ndata: {data}".encode()

    def delta(self, text: str) -> bytes:
        return self.head + msgspec.json.encode(text) + b"}}\n\n"


class Content:
    """The content of one answer, while it is generated.

    `streams`: whether events are wanted. `omits`: thoughts are not told, only that there was one.
    `held`: tools whose input is told when it is complete.
    """

    def __init__(
        self, signer: Signer, *, streams: bool, omits: bool = False, held: frozenset[str] = frozenset()
    ) -> None:
        self._signer = signer
        self._streams = streams
        self._omits = omits
        self._held = held
        self._blocks: list[_Block] = []
        self._open: _Block | None = None
        self._blanks: list[str] = []

    @property
    def calls(self) -> set[str]:
        """The ids of the calls that were told."""
        return {block.opened["id"] for block in self._blocks if block.kind == "tool_use"}

    def add(self, part: Part) -> bytes:
        """Make the events for a part of the output."""
        match part.kind:
            case "text":
                return self._say("text", part.text, {"type": "text", "text": ""})
            case "reasoning":
                opened = {"type": "thinking", "thinking": "", "signature": ""}
                return self._say("thinking", part.text, opened)
            case "call":
                out = b""
                if part.name is not None:
                    self._blanks.clear()
                    named = {"id": part.id or "", "name": part.name, "input": {}}
                    out = self._begin("tool_use", {"type": "tool_use", **named})
                if part.arguments and self._open is not None and self._open.kind == "tool_use":
                    out += self._put(part.arguments)
                return out
        return b""

    def close(self) -> bytes:
        """Make the events that end the open block, if there is one."""
        self._blanks.clear()
        block, self._open = self._open, None
        if block is None or not self._streams:
            return b""
        out = b""
        index = len(self._blocks) - 1
        if block.kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature(block)}
            out = event("content_block_delta", index=index, delta=delta)
        elif block.kind == "tool_use" and block.opened["name"] in self._held:
            out = block.delta("".join(block.pieces))
        return out + event("content_block_stop", index=index)

    def whole(self, calls: dict[str, JsonObject]) -> list[JsonObject]:
        """Make the blocks of a whole answer. `calls`: inputs by id; a call that was cut is left out."""
        made: list[JsonObject] = []
        for block in self._blocks:
            text = "".join(block.pieces)
            match block.kind:
                case "text":
                    made.append({**block.opened, "text": text})
                case "thinking":
                    shown = "" if self._omits else text
                    signed = {"thinking": shown, "signature": self._signature(block)}
                    made.append({**block.opened, **signed})
                case _ if block.opened["id"] in calls:
                    made.append({**block.opened, "input": calls[block.opened["id"]]})
        return made

    def _signature(self, block: _Block) -> str:
        return self._signer.sign("" if self._omits else "".join(block.pieces))

    def _say(self, kind: str, text: str, opened: JsonObject) -> bytes:
        block = self._open
        if block is not None and block.kind == kind:
            return self._put(text)
        if not text.strip():
            self._blanks.append(text)
            return b""
        begun = "".join([*self._blanks, text])
        return self._begin(kind, opened) + self._put(begun)

    def _begin(self, kind: str, opened: JsonObject) -> bytes:
        out = self.close()
        index = len(self._blocks)
        self._open = _Block(index, kind, opened)
        self._blocks.append(self._open)
        if not self._streams:
            return b""
        return out + event("content_block_start", index=index, content_block=opened)

    def _put(self, text: str) -> bytes:
        block = self._open
        assert block is not None
        block.pieces.append(text)
        silent = self._omits if block.kind == "thinking" else block.opened.get("name") in self._held
        return block.delta(text) if self._streams and not silent else b""
