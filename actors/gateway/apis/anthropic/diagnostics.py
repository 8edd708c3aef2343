"""Why a prompt is not the beginning of the one before: `diagnostics` of the Messages API.

A client names the message that it had last. Its request is compared with this one, as they are read:
marks of the cache and what is left out of prompts do not count. Only hashes and sizes are remembered,
in the process that gave the answer. Pure.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile, zip_longest
from typing import Literal, NamedTuple

import msgspec

from ramify.protocol.wire import ChatMessage, JsonObject

MOST_BYTES = 8 << 20  # that are remembered, the oldest first to go
ENTRY = 512  # bytes of one beside its messages, about
_PER_MESSAGE = 16

Change = Literal["tools_changed", "system_changed", "messages_changed", "previous_message_not_found"]


class Divergence(NamedTuple):
    """Where two prompts part. `share`: of the prompt's bytes, those from the first change on."""

    change: Change
    share: float

    def told(self, prompt: int) -> JsonObject:
        """Make `diagnostics`. `prompt`: tokens, of which the changed ones are estimated."""
        reason: JsonObject = {"type": self.change}
        if self.change != "previous_message_not_found":
            reason["cache_missed_input_tokens"] = round(prompt * self.share)
        return {"cache_miss_reason": reason}


class RequestMark(NamedTuple):
    """A request's tools, and its messages with those before them: 64 bits of a hash of each."""

    tools: int
    tool_bytes: int
    system: bool  # the first message is the system's
    hashes: "array[int]"
    sizes: "array[int]"  # bytes of each message

    @classmethod
    def of(cls, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] | None) -> "RequestMark":
        """Hash a request. O(bytes)."""
        encode = msgspec.json.Encoder().encode
        declared = encode(tools or ())
        running = blake2b(digest_size=8)
        hashes, sizes = array("Q"), array("Q")
        for message in messages:
            raw = encode(message)
            running.update(raw)
            hashes.append(int.from_bytes(running.digest(), "little"))
            sizes.append(len(raw))
        mark = blake2b(declared, digest_size=8).digest()
        system = bool(messages) and messages[0].role == "system"
        return cls(int.from_bytes(mark, "little"), len(declared), system, hashes, sizes)

    @property
    def size(self) -> int:
        """Bytes of memory that the mark takes."""
        return ENTRY + _PER_MESSAGE * len(self.hashes)

    def diverges(self, before: "RequestMark") -> Divergence | None:
        """Find where this request does not continue `before`; None: it continues it."""
        if self.tools != before.tools:
            return Divergence("tools_changed", 1.0)
        pairs = zip_longest(self.hashes, before.hashes[: len(self.hashes) + 1])
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same >= len(before.hashes):
            return None
        system = not same and (self.system or before.system)
        total = max(1, self.tool_bytes + sum(self.sizes))
        change: Change = "system_changed" if system else "messages_changed"
        return Divergence(change, sum(self.sizes[same:]) / total)


class RequestMarks:
    """The marks of the last answers, by credential and message."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._marks: OrderedDict[tuple[str, str], RequestMark] = OrderedDict()
        self._most = most_bytes
        self.size = 0

    def find(self, owner: str, ident: str) -> RequestMark | None:
        return self._marks.get((owner, ident))

    def add(self, owner: str, ident: str, mark: RequestMark) -> None:
        """Add the mark of a new answer, `ident`."""
        self._marks[owner, ident] = mark
        self.size += mark.size
        while self.size > self._most:
            _, oldest = self._marks.popitem(last=False)
            self.size -= oldest.size
