"""A bundle: the messages of one turn of the loop, sent as one frame.

A link costs a system call and some microseconds for each frame, so what hundreds of sessions are told
in a step must be one frame for their process. While the peer grants no credits the messages wait
here and join the next frame: a peer that is behind gets fewer, larger frames.

Encoding can fail (an integer over 64 bits, half a surrogate pair). A message is encoded when it is told,
not when all that waits leaves as one frame: so one that cannot be encoded fails its sender alone. The
encoded messages are the elements of one msgpack array, and the frame is made around them without looking
at them again.

It does not know what the messages mean, nor how many addressees they have.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.links.link import Link

T = TypeVar("T")

RETRY_SECONDS = 0.001  # while there are no credits
MOST = 1 << 18  # messages that wait: seconds of tokens of thousands of sessions
FRAME_BYTES = 1 << 24  # what begins another frame; a link takes far longer ones
LARGEST = 1 << 28  # bytes of one message; a link between processes takes frames of 2**30


class CannotEncode(Exception):
    """A message that msgpack cannot hold, or that is too large. Nothing of it was taken."""


class EncodedBatch:
    """A growing array. `count`: its messages; `size`: their bytes."""

    __slots__ = ("_body", "_encode_into", "_largest", "count", "size")

    def __init__(self, encoder: msgspec.msgpack.Encoder, largest: int = LARGEST) -> None:
        self._largest = largest
        self._encode_into = encoder.encode_into
        self._body = bytearray()
        self.count = 0
        self.size = 0

    def add(self, messages: list[Any]) -> None:
        """Encode `messages`. Raises CannotEncode, and then the batch is as it was."""
        body, encode_into, message = self._body, self._encode_into, None
        try:
            for message in messages:
                encode_into(message, body, -1)
        except Exception as error:  # which types and values it does not know is the codec's to say
            del body[self.size :]
            raise CannotEncode(f"a {type(message).__name__} cannot be encoded: {error}") from error
        size = len(body)
        added = size - self.size
        if added > self._largest:
            del body[self.size :]
            raise CannotEncode(f"a {type(message).__name__} of {added} bytes: at most {self._largest}")
        self.size = size
        self.count += len(messages)

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


class Bundle(Generic[T]):
    """Collects messages for `link`; an `Address`.

    `wrap` makes one frame of the array of them, in order; `encoder`: the link's.
    """

    def __init__(
        self,
        link: Link[Any, Any],
        wrap: Callable[[Any], Any],
        encoder: msgspec.msgpack.Encoder,
        most: int = MOST,
    ) -> None:
        self._link = link
        self._wrap = wrap
        self._encoder = encoder
        self._most = most
        self._batch = EncodedBatch(encoder)  # of the frame that grows
        self._full: deque[EncodedBatch] = deque()  # of those before it
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.Handle | None = None
        self._left: asyncio.Future[None] | None = None  # for `sent`

    def __len__(self) -> int:
        """Messages that have not left."""
        return self._count

    def put(self, items: list[T]) -> None:
        """Add messages; the caller is going to `flush`. If it raises, nothing was added.

        Raises MailboxFull if more than `most` messages would wait: the peer has stopped reading. Raises
        CannotEncode.
        """
        if self._count + len(items) > self._most:
            raise MailboxFull(f"{self._count} messages wait and the peer grants no credits")
        batch = self._batch
        batch.add(items)
        self._count += len(items)
        if batch.size >= FRAME_BYTES:
            self._full.append(batch)
            self._batch = EncodedBatch(self._encoder)

    def tell(self, item: T, /) -> None:
        """Add a message that leaves with this turn of the loop. Raises as `put`."""
        self.put([item])
        if self._due is None:
            self._due = self._loop.call_soon(self._run)

    def flush(self) -> None:
        """Send what waits, as one frame, if the peer grants a credit; else as soon as it does."""
        while self._count:
            if not self._link.credits:
                if self._due is None:
                    self._due = self._loop.call_later(RETRY_SECONDS, self._run)
                return
            if self._full:
                batch = self._full.popleft()
            else:
                batch, self._batch = self._batch, EncodedBatch(self._encoder)
            self._count -= batch.count
            try:
                self._link.tell(self._wrap(batch.array()))
            except MailboxClosed:  # whoever owns the link hears of its end
                self.close()
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    async def sent(self) -> None:
        """Return when nothing waits. Call it with a timeout: a peer that is gone grants no credits."""
        self.flush()
        while self._count:
            self._left = self._loop.create_future()
            await self._left

    def close(self) -> None:
        """Forget what waits."""
        self._full.clear()
        self._batch = EncodedBatch(self._encoder)
        self._count = 0
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _run(self) -> None:
        self._due = None
        self.flush()
