"""How a session begins: `connect`, with the settings of `open` and of the connection.

    async with connect("ws://127.0.0.1:8765") as session:
        async for delta in session.main.chat("Capital of France?"):
            print(delta.text, end="")

    session = await connect("ws://127.0.0.1:8765")     # the same; ends with `await session.close()`

The socket is `session_link.py`'s, the state `session.py`'s; this file only puts them together.
"""

import base64
import random
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, Unpack

from ramify.clients.handles import Session
from ramify.clients.session import ClientCore
from ramify.clients.session_link import SessionLink, Token, Watch
from ramify.protocol.codec import Codec, CodecName
from ramify.protocol.wire import ClientMessage, Open


class ConnectSettings(TypedDict, total=False):
    """The settings of `connect` and `connect_sync`.

    `client` names this client in the session (default: a random name): give the same name to go on
    after a crash of the program. `session` and `key`: attach to a session that exists. `token`: a
    bearer token, or a function (also async) that returns a fresh one for each connection. `tokens`:
    deltas carry token ids as well; `parts`: they say what of their text is answer, thought or call.
    `reconnect`: make a lost connection again, for `give_up_s` seconds. `watch`: a function that is
    told when the connection is lost and when it is there again; it is called on the event loop and
    must not wait. `imports`: a new session that is what `Session.export` wrote, of this server or
    another one with the same model. `keep`: leave the session on the server at the end (for `ttl_s`);
    otherwise it is closed. The others are those of `open`, see protocol.md.
    """

    client: str | None
    session: str | None
    key: str | None
    token: Token | None
    codec: CodecName
    model: str | None
    template: Literal["append", "strict"]
    tools: list[dict[str, Any]] | None
    detach: Literal["run", "pause", "cancel"]
    tick_ms: int
    tokens: bool
    parts: bool
    ttl_s: float | None
    reconnect: bool
    give_up_s: float
    open_timeout_s: float
    watch: Watch | None
    imports: bytes | None
    keep: bool


class Connecting:
    """What `connect` returns: `async with` it, or `await` it. Nothing happens before that.

    Raises ConnectionLost, Unauthorized, Forbidden, NoSession, BadRequest or Unsupported.
    """

    def __init__(self, url: str, settings: ConnectSettings) -> None:
        self._url = url
        self._settings = settings
        self._session: Session | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"connect() gives no session yet, so it has no {name!r}: await it, or use `async with`"
            )

    def __await__(self) -> Generator[Any, None, Session]:
        return self._attach().__await__()

    async def __aenter__(self) -> Session:
        self._session = await self._attach()
        return self._session

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def _attach(self) -> Session:
        given = self._settings
        link = SessionLink(
            self._url,
            ClientCore(open_message(given)),
            codec=given.get("codec", "json"),
            token=given.get("token"),
            reconnect=given.get("reconnect", True),
            give_up_s=given.get("give_up_s", 600.0),
            open_timeout_s=given.get("open_timeout_s", 10.0),
            watch=given.get("watch"),
        )
        await link.start()
        return Session(link, keep=given.get("keep", False))


def connect(url: str, **settings: Unpack[ConnectSettings]) -> Connecting:
    """Attach to a server: a new session, or with `session` and `key` one that exists.

    Use it with `async with`, or `await` it and `close` the session. The settings are `ConnectSettings`.
    """
    unknown = settings.keys() - ConnectSettings.__annotations__.keys()
    if unknown:  # at the call, as for any function
        raise TypeError(
            f"connect() has no setting {min(unknown)!r}: {', '.join(ConnectSettings.__annotations__)}"
        )
    return Connecting(url, settings)


def open_message(given: ConnectSettings) -> Open:
    """Make the `open` of a new connection. Raises BadRequest for a setting that servers refuse."""
    message = Open(
        client=given.get("client") or f"py-{random.SystemRandom().getrandbits(48):012x}",
        session=given.get("session"),
        key=given.get("key"),
        model=given.get("model"),
        ttl_s=given.get("ttl_s"),
        detach=given.get("detach", "run"),
        tick_ms=given.get("tick_ms", 0),
        tokens=given.get("tokens", False),
        parts=given.get("parts", False),
        tools=given.get("tools"),
        template=given.get("template", "append"),
        import_=_text(given.get("imports")),
    )
    codec = Codec("json")
    messages: list[ClientMessage] = [message]
    codec.decode_client(codec.encode(messages))
    return message


def _text(file: bytes | None) -> str | None:
    return None if file is None else base64.b64encode(file).decode()
