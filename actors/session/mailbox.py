"""A session's mailbox: frames of clients leave room for what the engine says, and are bounded in bytes.

A frame that finds no room is refused, and its client sends it again. Tokens, notices and answers of
the cache must arrive; they have the rest of the room to themselves.
"""

from typing import TypeVar

from ramify.actors.kit.mailbox import Mailbox, MailboxFull
from ramify.protocol.messages import Attach, Frame

T = TypeVar("T")

CAPACITY = 4096
FRAMES = CAPACITY * 3 // 4  # messages of which kind ever, beyond which frames are refused
FRAME_BYTES = 8 << 20  # of frames that wait, as they came over the sockets
_FROM_CLIENTS = Frame, Attach  # made once: `tell` is called for each message of a step


class SessionMailbox(Mailbox[T]):
    """See the module docstring. `tell` raises MailboxFull for a frame or an `open` sooner."""

    def __init__(self, name: str) -> None:
        super().__init__(name, CAPACITY)
        self._bytes = 0

    def tell(self, message: T, /) -> None:
        if not isinstance(message, _FROM_CLIENTS):
            super().tell(message)
            return
        size = message.size
        if len(self) >= FRAMES or (self._bytes and self._bytes + size > FRAME_BYTES):
            raise MailboxFull(f"{self.name}: {len(self)} messages, {self._bytes} bytes of frames wait")
        super().tell(message)
        self._bytes += size

    async def drain(self) -> list[T]:
        messages = await super().drain()
        self._bytes = 0
        return messages
