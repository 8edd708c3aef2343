"""The end of a link in a process without an event loop: blocking reads and writes.

Used by the executor's process, whose one thread alternates between the GPU and this socket. It
does not know what the messages mean. It imports no asyncio: its process should start quickly.
"""

import contextlib
import select
import socket
from collections import deque
from typing import Generic

import msgspec

from ramify.actors.links.frames import MAX_FRAME, WINDOW, In, LinkClosed, LinkCore, Out

_READ_BYTES = 1 << 18


class BlockingLink(Generic[Out, In]):
    """One end of a connected Unix stream socket, which it owns."""

    def __init__(
        self,
        sock: socket.socket,
        decoder: "msgspec.msgpack.Decoder[In]",
        encoder: msgspec.msgpack.Encoder,
        *,
        window: int = WINDOW,
        max_frame: int = MAX_FRAME,
    ) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._core: LinkCore[Out, In] = LinkCore(
            decoder, encoder, window=window, queue=1, max_frame=max_frame
        )
        self._received: deque[In] = deque()
        self._write()

    def receive(self, timeout: float | None) -> In | None:
        """The next message; None after `timeout` seconds (None: wait for ever, 0: do not wait).

        Raises LinkClosed at the end of the peer, LinkError if it left in mid-frame or sent
        garbage.
        """
        while not self._received:
            if timeout is not None and not select.select([self._sock], [], [], timeout)[0]:
                return None
            self._read()
        message = self._received.popleft()
        self._core.consumed()
        self._write()
        return message

    def send(self, message: Out) -> None:
        """Send `message`; waits while there are no credits. Raises LinkClosed and LinkError."""
        self._core.send(message)
        self._write()
        while self._core.waiting:
            self._read()
            self._write()

    def finish(self, timeout: float) -> None:
        """Say that nothing more will be sent, and discard what comes until the peer has closed.

        A socket closed with unread bytes in it resets the connection, and the peer may then lose
        our last message. Waits at most `timeout` seconds between two arrivals.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(timeout)
            while self._sock.recv(_READ_BYTES):
                pass

    def close(self) -> None:
        """Close the socket. May be called twice."""
        self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except ConnectionError as error:
            raise LinkClosed(str(error)) from None
        if not data:
            self._core.end()
            raise LinkClosed("the peer has closed")
        self._received.extend(self._core.feed(data))

    def _write(self) -> None:
        data = self._core.take()
        if data:
            try:
                self._sock.sendall(data)
            except ConnectionError as error:
                raise LinkClosed(str(error)) from None
