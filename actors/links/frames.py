"""The pure half of a link between two processes: framing, credits, the bounded outgoing queue.

A byte stream carries words of four little-endian bytes. A word without the top bit is the length
of the frame that follows (one msgpack message); a word with the top bit is a grant of that many
*credits* and nothing follows. A side may send one message for each credit that it was granted, so
what a slow reader can be made to hold is bounded by what it granted itself.

    [length][message .......][length][message ...][grant]

It does not know sockets, event loops or clocks: `link.py` (asyncio) and `blocking_link.py` (a
process without a loop) feed it bytes and write what `take` returns. Two cores talk to each other
in memory in the tests.
"""

import struct
from collections import deque
from typing import Generic, TypeVar

import msgspec

In = TypeVar("In")
Out = TypeVar("Out")

_WORD = struct.Struct("<I")
_GRANT = 0x8000_0000
MAX_FRAME = 64 << 20  # bytes; a step of 2048 prompt tokens is some 10 KB
WINDOW = 256  # messages on their way


class LinkError(Exception):
    """The peer broke the framing, overdrew its credits or left in mid-frame. The link is over."""


class LinkClosed(Exception):
    """The peer has gone, at the end of a frame."""


class LinkCore(Generic[Out, In]):
    """One side of a link. `window`: credits that this side grants its peer.

    `queue`: messages that wait here when the peer's credits are used up. `max_frame`: bytes of one
    message, for both directions. `encoder` and `decoder` are reused for every message.
    """

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[In]",
        encoder: msgspec.msgpack.Encoder,
        *,
        window: int = WINDOW,
        queue: int = WINDOW,
        max_frame: int = MAX_FRAME,
    ) -> None:
        self._decoder = decoder
        self._encoder = encoder
        self._window = window
        self._queue_size = queue
        self._max_frame = max_frame
        self._queue: deque[bytes] = deque()  # encoded, waiting for credits
        self.ready: list[bytes] = [_WORD.pack(_GRANT | window)]  # to be written; the grant opens
        self.credits = 0  # messages that may be sent before the peer grants more
        self._open = window  # messages that the peer may still send
        self._used = 0  # messages consumed here, not yet granted again
        self._partial = bytearray()
        self._needed = 0  # bytes that `_partial` must reach before parsing it is worth the copy

    @property
    def full(self) -> bool:
        """No credits, and the outgoing queue is at its bound."""
        return not self.credits and len(self._queue) >= self._queue_size

    @property
    def waiting(self) -> int:
        """Messages in the outgoing queue."""
        return len(self._queue)

    def send(self, message: Out) -> None:
        """Encode and queue `message`. Raises LinkError if it is too big, or if `full`."""
        body = self._encoder.encode(message)
        if len(body) > self._max_frame:
            kind = type(message).__name__
            raise LinkError(f"a {kind} of {len(body)} bytes: a frame holds at most {self._max_frame}")
        frame = _WORD.pack(len(body)) + body
        if self.credits:
            self.credits -= 1
            self.ready.append(frame)
        elif len(self._queue) < self._queue_size:
            self._queue.append(frame)
        else:
            raise LinkError(f"{len(self._queue)} messages wait and the peer grants no credits")

    def consumed(self, count: int = 1) -> None:
        """The owner is done with `count` received messages: the peer may send as many again.

        Granted in lots of half a window, so that a grant is a rare frame.
        """
        self._used += count
        if self._used * 2 >= self._window:
            self.ready.append(_WORD.pack(_GRANT | self._used))
            self._open += self._used
            self._used = 0

    def take(self) -> bytes:
        """Everything that may be written now; b"" if nothing."""
        if not self.ready:
            return b""
        data = self.ready[0] if len(self.ready) == 1 else b"".join(self.ready)
        self.ready.clear()
        return data

    def feed(self, data: bytes) -> list[In]:
        """The messages that `data` completes, in order.

        Raises LinkError for a frame over the cap, one that does not decode, and one without a
        credit. Messages that came before it in the same `data` are lost with the link.
        """
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return []
            data = bytes(self._partial)
        messages: list[In] = []
        at = 0
        self._needed = 4
        while len(data) - at >= 4:
            (word,) = _WORD.unpack_from(data, at)
            if word & _GRANT:
                self._granted(word & ~_GRANT)
                at += 4
                continue
            if word > self._max_frame:
                raise LinkError(f"a frame of {word} bytes: at most {self._max_frame} are allowed")
            end = at + 4 + word
            if end > len(data):
                self._needed = end - at
                break
            messages.append(self._decode(data[at + 4 : end]))
            at = end
        self._partial[:] = data[at:]
        return messages

    def end(self) -> None:
        """The stream has ended. Raises LinkError if that was in mid-frame."""
        if self._partial:
            raise LinkError(f"the peer left in mid-frame, after {len(self._partial)} bytes of it")

    def _granted(self, credits: int) -> None:
        self.credits += credits
        while self.credits and self._queue:
            self.credits -= 1
            self.ready.append(self._queue.popleft())

    def _decode(self, body: bytes) -> In:
        if not self._open:
            raise LinkError("the peer sent more messages than it was granted")
        self._open -= 1
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LinkError(f"a frame does not decode: {error}") from None
