"""A link to an actor in another process, seen from an event loop.

`Link` is an `Address`: `tell` is synchronous, never blocks, and raises MailboxFull when the peer's
credits and the outgoing queue are used up. Both directions share one socket. What arrives goes to
`on_message`, one call a message, in order; the owner calls `consumed` when it is done with one,
which is what lets the peer send more. The end of the peer, by whatever cause, is one call of
`on_end`.

It does not know what the messages mean, who the peer is or how to start it.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic

import msgspec

from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.links.frames import MAX_FRAME, WINDOW, In, LinkCore, LinkError, Out


class Link(asyncio.Protocol, Generic[Out, In]):
    """One end of a socket. Make it with `open_link`."""

    def __init__(
        self,
        name: str,
        core: LinkCore[Out, In],
        on_message: Callable[[In], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self.name = name
        self._core = core
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._closing = False
        self._flush_due = False
        self._error: Exception | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def tell(self, message: Out, /) -> None:
        """Send `message`, or queue it until the peer grants credits.

        The first message of a loop iteration is written at once; those that follow it in the same
        iteration go out together at the iteration's end. Raises MailboxFull, MailboxClosed, and
        LinkError for a message over the frame cap.
        """
        if self._closing:
            raise MailboxClosed(self.name)
        if self._core.full:
            raise MailboxFull(f"{self.name}: no credits, and {self._core.waiting} messages wait")
        self._core.send(message)
        if not self._flush_due:
            self._flush_due = True
            self._write()
            self._loop.call_soon(self._flush)

    def consumed(self, count: int = 1) -> None:
        """`count` received messages are dealt with: grant the peer as many credits again."""
        self._core.consumed(count)
        if self._core.ready:
            self._write()

    @property
    def credits(self) -> int:
        """Messages that can be told before the next one is queued here."""
        return self._core.credits

    @property
    def closed(self) -> bool:
        """True once nothing more can be told."""
        return self._closing

    def close(self) -> None:
        """Write what credits allow, then close. `on_end` is called with None."""
        self._closing = True
        if self._transport is not None:
            self._write()
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what is not written yet is lost."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Return once the socket is closed and `on_end` has been called."""
        await asyncio.shield(self._ended)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._write()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            messages = self._core.feed(data)
        except LinkError as error:
            self._error = error
            self.abort()
            return
        if self._core.ready:
            self._write()
        for message in messages:
            self._on_message(message)

    def eof_received(self) -> None:
        if not self._closing:
            try:
                self._core.end()
            except LinkError as error:
                self._error = error

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._transport = None
        self._ended.set_result(None)
        self._on_end(self._error or exc)

    def _flush(self) -> None:
        self._flush_due = False
        self._write()

    def _write(self) -> None:
        transport = self._transport
        if self._core.ready and transport is not None and not transport.is_closing():
            transport.write(self._core.take())


def link_over(
    name: str,
    decoder: "msgspec.msgpack.Decoder[In]",
    encoder: msgspec.msgpack.Encoder,
    transport: asyncio.Transport,
    received: bytes,
    *,
    on_message: Callable[[In], None],
    on_end: Callable[[Exception | None], None],
    max_frame: int = MAX_FRAME,
) -> "Link[Any, In]":
    """Make a link of a connection that another protocol has had until now, over TCP or TLS.

    `received`: what came behind that one's bytes. The rest as in `open_link`.
    """
    core: LinkCore[Any, In] = LinkCore(decoder, encoder, max_frame=max_frame)
    link: Link[Any, In] = Link(name, core, on_message, on_end)
    transport.set_protocol(link)
    link.connection_made(transport)
    if received:  # before what the transport reads next, and after the caller has the link
        asyncio.get_running_loop().call_soon(link.data_received, received)
    return link


async def open_link(
    name: str,
    sock: socket.socket,
    decoder: "msgspec.msgpack.Decoder[In]",
    encoder: msgspec.msgpack.Encoder,
    *,
    on_message: Callable[[In], None],
    on_end: Callable[[Exception | None], None],
    window: int = WINDOW,
    queue: int = WINDOW,
    max_frame: int = MAX_FRAME,
) -> "Link[Any, In]":
    """Make a link of a connected Unix stream socket, which it owns from here on.

    `on_end` is called exactly once: with None after `close` and at a clean end of the peer, with
    LinkError if the peer broke the rules, with OSError if the socket failed. Credits, `queue` and
    `max_frame`: see `LinkCore`; both ends must use the same `max_frame`.
    """
    core: LinkCore[Any, In] = LinkCore(decoder, encoder, window=window, queue=queue, max_frame=max_frame)
    link: Link[Any, In] = Link(name, core, on_message, on_end)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sock)
    except BaseException:
        sock.close()
        raise
    return link
