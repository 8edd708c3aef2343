"""Messages for another process, encoded as they come.

Encoding can fail (an integer over 64 bits, half a surrogate pair). A message is encoded when it is
told, not when all that waits leaves as one frame. So a message that cannot be encoded fails its sender
alone. The encoded messages are the elements of one msgpack array, so the frame is made around them
without looking at them again.
"""

from typing import Any

import msgspec

LARGEST = 1 << 28  # bytes of one message; a link between processes takes frames of 2**30


class CannotEncode(Exception):
    """A message that msgpack cannot hold, or that is too large. Nothing of it was taken."""


class Batch:
    """A growing array. `count`: its messages; `size`: their bytes."""

    __slots__ = ("_body", "_encode_into", "_largest", "count", "size")

    def __init__(self, encoder: msgspec.msgpack.Encoder, largest: int = LARGEST) -> None:
        self._largest = largest
        self._encode_into = encoder.encode_into
        self._body = bytearray()
        self.count = 0
        self.size = 0

    def add(self, message: Any) -> None:
        """Encode `message`. Raises CannotEncode, and then the batch is as it was."""
        body = self._body
        try:
            self._encode_into(message, body, -1)
        except Exception as error:  # which types and values it does not know is the codec's to say
            del body[self.size :]
            raise CannotEncode(f"a {type(message).__name__} cannot be encoded: {error}") from error
        size = len(body)
        added = size - self.size
        if added > self._largest:
            del body[self.size :]
            raise CannotEncode(f"a {type(message).__name__} of {added} bytes: at most {self._largest}")
        self.size = size
        self.count += 1

    def array(self) -> msgspec.Raw:
        """The messages as one array, to be put where a list of them stands."""
        count = self.count
        if count < 16:
            head = bytes([0x90 | count])
        elif count < 1 << 16:
            head = b"\xdc" + count.to_bytes(2, "big")
        else:
            head = b"\xdd" + count.to_bytes(4, "big")
        return msgspec.Raw(head + self._body)
