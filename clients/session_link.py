"""The asyncio shell of the client: sockets, reconnects, wake-ups. What they mean is in `session.py`.

`SessionLink` owns the socket: one task reads, one writes. A lost connection is made again and the
session resumed, unseen by those who wait for replies. This file does not know what ops mean.
"""

import asyncio
import errno
import inspect
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from ramify.clients.errors import ConnectionLost, Internal
from ramify.clients.events import (
    Changed,
    ConnectionRefused,
    CoreEvent,
    Foreign,
    Noted,
    SessionEnded,
    SessionOpened,
)
from ramify.clients.reconnect import RATE_DELAY_S, Action, Pacer, delay, pause
from ramify.clients.session import ClientCore, SessionPhase
from ramify.clients.stream import Ticket
from ramify.protocol.codec import SUBPROTOCOLS, Codec, CodecName
from ramify.protocol.errors import (
    BadRequest,
    Close,
    Forbidden,
    LimitExceeded,
    RamifyError,
    Unauthorized,
)
from ramify.protocol.wire import Bye, Delta, Error, Event, Op

Token = str | Callable[[], str | Awaitable[str]]


class Connection(NamedTuple):
    """The connection was lost, or is there again.

    `error`: why it was lost. `over`: for good, so the session's handles raise `error` from now on.
    """

    up: bool
    error: RamifyError | None = None
    over: bool = False


Watch = Callable[[Connection], None]

MOST_BYTES = 1 << 28  # of one frame of the server: what it may keep of a whole session
STEADY_S = 5.0  # a connection that lasts so long was a good one: what comes later is a new loss
SUDDEN = 5  # connections that ended sooner, one after the other, before the next one waits longer
_NOTES = 1024  # events kept for a reader of `Session.events`; older ones are dropped


class SessionLink:
    """The connection of one session. `ended` is the reason once it is over for good."""

    def __init__(
        self,
        url: str,
        core: ClientCore,
        *,
        codec: CodecName,
        token: Token | None,
        reconnect: bool,
        give_up_s: float,
        open_timeout_s: float,
        watch: Watch | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.core = core
        self.notes: deque[Event | Bye | Error | Delta] = deque(maxlen=_NOTES)
        self.reconnects = 0
        self._url = websocket_url(url)
        self._codec = Codec(codec)
        self._subprotocol = next(name for name, kind in SUBPROTOCOLS.items() if kind == codec)
        self._token = token
        self._reconnect = reconnect
        self._give_up_s = give_up_s
        self._open_timeout_s = open_timeout_s
        self._watch = watch
        self._shown = Connection(up=True)  # what `watch` was told last
        self.jitter = jitter
        self._pacer = Pacer(time.monotonic)
        self._wake = asyncio.Event()
        self._waiters: dict[object, list[asyncio.Future[None]]] = {}
        self._refused: ConnectionRefused | None  # of the present or the last connection
        self._attached: bool  # as it
        self._task: asyncio.Task[None] | None = None
        self._socket: ClientConnection | None = None

    # --- what handles use -------------------------------------------------------------------

    def submit(self, ops: Sequence[Op]) -> list[Ticket]:
        """Send one frame of ops, as soon as the connection and the limits allow."""
        tickets = self.core.submit(ops)
        self._wake.set()
        return tickets

    def credit(self, branch: str, upto: int) -> None:
        self.core.credit(branch, upto)
        self._wake.set()

    def withdraw(self, ticket: Ticket, error: RamifyError) -> bool:
        """Take back an op that was not sent; see `ClientCore.withdraw`."""
        if not self.core.withdraw(ticket, error):
            return False
        for each in ticket.frame:
            self._notify(each)
        return True

    async def changed(self, key: object) -> None:
        """Wait until something happens to a ticket (or to `notes`)."""
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(key, [])
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if self._waiters.get(key) is waiters:  # else `_notify` took the list away
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[key]
            raise

    def _notify(self, key: object) -> None:
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    @property
    def attached(self) -> bool:
        """Whether the session is attached right now."""
        return self.core.phase is SessionPhase.OPEN

    # --- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and attach. Raises the error that prevented it."""
        self._task = asyncio.create_task(self._run(), name="ramify-link")
        try:
            while not self.core.known and self.core.error is None:
                await self.changed(self)
        except BaseException:
            await self.stop()
            raise
        if self.core.error is not None:
            await self.stop()
            raise self.core.error

    async def stop(self) -> None:
        """Close the socket and end the session's handles; the server keeps the session."""
        self.unwatch()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def unwatch(self) -> None:
        """Tell `watch` nothing more: what ends now was ended here."""
        self._watch = None

    def abort(self) -> None:
        """Break the connection as a lost network would (for tests of the resume)."""
        if self._socket is not None:
            self._socket.transport.abort()

    async def _run(self) -> None:
        error: RamifyError = ConnectionLost("the client closed the connection")
        try:
            error = await self._connections()
        except RamifyError as raised:
            error = raised
        except Exception as fault:  # a field of a type that nobody expects, say
            error = Internal(f"the server sent what this client does not understand: {fault!r}")
        finally:
            self._dispatch(self.core.end(error))
            self._notify(self)

    def _tell(self, now: Connection) -> None:
        """Tell `watch` once for each change. It hears nothing of a session that was never attached."""
        if (now.up, now.over) != (self._shown.up, self._shown.over) and self.core.known:
            self._shown = now
            if self._watch is not None:
                self._watch(now)

    async def _connections(self) -> RamifyError:
        """Connect, serve, reconnect. Returns why that ended."""
        attempt, sudden, lost_at, floor = 0, 0, 0.0, 0.0
        while True:
            self._refused, self._attached = None, False
            try:
                socket = await self._dial()
            except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as raised:
                error, again = _dial_error(raised, self._url)
            else:
                begun = time.monotonic()
                error, again, floor = await self._serve(socket)
                if self._attached:
                    sudden = sudden + 1 if time.monotonic() - begun < STEADY_S else 0
                    attempt, lost_at = max(0, sudden - SUDDEN), 0.0
            if not again or not self.core.known or not self._reconnect:
                return error
            self._tell(Connection(up=False, error=error))
            now = time.monotonic()
            lost_at = lost_at or now
            wait = delay(attempt, self.jitter(), floor)
            if now + wait - lost_at > self._give_up_s:
                return ConnectionLost(f"no way back to the server in {self._give_up_s:.0f} s: {error}")
            attempt += 1
            await asyncio.sleep(wait)

    async def _dial(self) -> ClientConnection:
        headers = {}
        if self._token is not None:
            token = self._token if isinstance(self._token, str) else self._token()
            if inspect.isawaitable(token):
                token = await token
            headers["Authorization"] = f"Bearer {token}"
        return await websocket(
            self._url,
            subprotocols=[Subprotocol(self._subprotocol)],
            compression=None,
            additional_headers=headers,
            open_timeout=self._open_timeout_s,
            close_timeout=2,
            max_size=MOST_BYTES,
            proxy=None,
        )

    async def _serve(self, socket: ClientConnection) -> tuple[RamifyError, bool, float]:
        """Use one connection to its end. Returns why it ended, whether to retry, the least wait."""
        self._socket = socket
        try:
            if socket.subprotocol != self._subprotocol:
                raise Internal(f"the server at {self._url} does not speak {self._subprotocol}")
            code, reason = await self._pump(socket)
        finally:
            self._socket = None
            await socket.close()
        verdict, events = self.core.disconnected(code, reason)
        self._dispatch(events)
        if self._refused is not None:
            error, retry = self._refused
            retry = retry or (isinstance(error, Unauthorized) and callable(self._token))
            return error, retry, pause(error.retry_ms)
        if verdict.action is Action.STOP:
            return verdict.error, False, 0.0
        if verdict.action is Action.SPLIT and not self._attached:  # it would be as big again
            opened = f"{verdict.error.message}: what the session was to be opened with"
            return LimitExceeded(opened, details=verdict.error.details), False, 0.0
        if verdict.action is Action.NEW_TOKEN:
            return verdict.error, callable(self._token), 0.0
        self.reconnects += 1
        return verdict.error, True, RATE_DELAY_S if verdict.action is Action.BACK_OFF else 0.0

    async def _pump(self, socket: ClientConnection) -> tuple[int | None, str]:
        """Read until the connection ends; returns the close code and reason."""
        writer = asyncio.create_task(self._write(socket), name="ramify-writer")
        try:
            async with asyncio.timeout(self._open_timeout_s):
                while not self._attached and self._going:
                    self._take(await socket.recv(decode=False))
            while self._going:
                self._take(await socket.recv(decode=False))
            return None, ""
        except TimeoutError:
            return None, f"no answer to `open` in {self._open_timeout_s:g} s"
        except ConnectionClosed as closed:
            received, sent = closed.rcvd, closed.sent
            if received is None and sent is not None and sent.code == Close.TOO_BIG:
                raise Internal(f"the server sent a frame of more than {MOST_BYTES} bytes") from None
            return (received.code, received.reason) if received else (None, "")
        except BadRequest as fault:
            raise Internal(f"the server sent a frame that does not decode: {fault.message}") from None
        finally:
            writer.cancel()
            (result,) = await asyncio.gather(writer, return_exceptions=True)
            if isinstance(result, Exception) and not isinstance(result, ConnectionClosed):
                raise result

    @property
    def _going(self) -> bool:
        return self._refused is None and self.core.error is None

    def _take(self, data: bytes) -> None:
        for message in self._codec.decode_server(data):
            self._dispatch(self.core.receive(message))
        self._wake.set()  # replies make room for frames that wait

    async def _write(self, socket: ClientConnection) -> None:
        frame = self.core.connected()
        while True:
            await socket.send(self._codec.encode(frame), text=not self._codec.binary)
            while (following := self.core.next_frame()) is None:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(self._pacer.wait(len(following)))
            frame = following

    def _dispatch(self, events: list[CoreEvent]) -> None:
        for event in events:
            match event:
                case Changed(ticket):
                    self._notify(ticket)
                case Foreign(message) | Noted(message):
                    self.notes.append(message)
                    self._notify(self.notes_key)
                case SessionOpened():
                    self._attached = True
                    limits = self.core.limits
                    rate = limits.get("ops_per_second", 0)
                    self._pacer.limit(rate, limits.get("ops_burst", rate))
                    self._tell(Connection(up=True))
                    self._notify(self)
                case ConnectionRefused():
                    self._refused = event
                case SessionEnded(error):
                    self._tell(Connection(up=False, error=error, over=True))
                    self._notify(self)
                    self._notify(self.notes_key)

    notes_key = "notes"


def websocket_url(url: str) -> str:
    """Turn `http(s)` into `ws(s)`; a URL without a path gets `/v1/ws`."""
    scheme, sep, rest = url.partition("://")
    if not sep:
        scheme, rest = "ws", url
    scheme = {"http": "ws", "https": "wss"}.get(scheme, scheme)
    if scheme not in ("ws", "wss") or not rest:
        raise BadRequest(f"{url!r} is not a server address: give ws://host:port or http://host:port")
    host, _, path = rest.partition("/")
    try:
        urlsplit(f"//{host}").port  # noqa: B018 - it is checked when it is asked for
    except ValueError as error:
        raise BadRequest(f"{url!r} is not a server address: {error}") from None
    return f"{scheme}://{host}/{path or 'v1/ws'}"


def _dial_error(raised: Exception, url: str) -> tuple[RamifyError, bool]:
    """Make the error for a connection that failed. Returns also whether a later try may succeed."""
    if isinstance(raised, InvalidStatus):
        status = raised.response.status_code
        body = bytes(raised.response.body or b"").decode("utf-8", "replace").strip()
        text = f"{url} answered HTTP {status}{': ' + body[:500] if body else ''}"
        kinds: dict[int, type[RamifyError]] = {400: BadRequest, 401: Unauthorized, 403: Forbidden}
        return kinds.get(status, ConnectionLost)(text, details={"status": status}), status >= 500
    if isinstance(raised, InvalidURI):
        return BadRequest(f"{url!r} is not a WebSocket address: {raised}"), False
    reason = str(raised) or type(raised).__name__
    if isinstance(raised, OSError) and f"[Errno {errno.ECONNREFUSED}]" in reason:
        # Also one of several addresses: asyncio puts their errors into one text, without an errno.
        reason = "nothing listens there (ramify serve starts a server)"
    return ConnectionLost(f"cannot connect to {url}: {reason}"), not isinstance(raised, InvalidHandshake)
