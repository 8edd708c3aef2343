"""Limits on what one client may ask for. See `settings` for how a setting is declared."""

from functools import lru_cache
from typing import Annotated, ClassVar

import msgspec

from ramify.protocol.settings import Setting, Settings
from ramify.protocol.wire import MAX_NAMES, MOST_PRIORITY


def _most(help: str, flag: str = "") -> Setting:
    return Setting(help, flag=flag, low=1)


class Limits(Settings, frozen=True, kw_only=True):
    """Sent in `state.limits`; each is a server flag. Memory of the host is an estimate."""

    GROUP: ClassVar[str] = "limits"
    PREFIX: ClassVar[str] = "limit-"

    frame_bytes: Annotated[int, _most("bytes of a WebSocket message")] = 1 << 20
    frame_bytes_before_open: Annotated[
        int, _most("bytes of the first one, before a token was shown")
    ] = 8 << 10
    # a tree of thought, five wide and three deep, takes about 300
    ops_per_frame: Annotated[int, _most("messages in a frame")] = 512
    ops_in_flight: Annotated[int, _most("ops without a reply, of a session")] = 1024
    ops_per_second: Annotated[int, _most("messages a second, of a socket")] = 200
    # less than `ops_per_frame`: frames of more are always refused
    ops_burst: Annotated[int, _most("messages at once, of a socket")] = 1024
    bytes_per_second: Annotated[
        int, _most("bytes a second, received of a socket; beyond it the socket is read more slowly")
    ] = 1 << 20
    bytes_burst: Annotated[int, _most("bytes received at once, of a socket")] = 8 << 20
    branches: Annotated[int, _most("branches of a session")] = 1024
    running: Annotated[int, _most("generations of a session that run at once; the rest wait")] = 64
    n: Annotated[int, Setting("generations of one op by `n`", low=1, high=MAX_NAMES)] = 64
    priority: Annotated[
        int,
        Setting(
            "the highest `priority` of a generation; --credential-priority for names",
            low=-MOST_PRIORITY,
            high=MOST_PRIORITY,
        ),
    ] = MOST_PRIORITY
    attachments: Annotated[int, _most("sockets of a session, and as many viewers")] = 8
    histories: Annotated[
        int, _most("conversations of stateless requests whose tokens are kept, in one process")
    ] = 1 << 14
    history_bytes: Annotated[int, _most("bytes of text and tokens of those conversations")] = 256 << 20
    # it is kept and shown again
    meta_bytes: Annotated[int, _most("bytes of one `meta`, as JSON")] = 16 << 10
    queued_bytes: Annotated[
        int, _most("bytes that wait for a socket before its deltas are held back")
    ] = 256 << 10
    regex_bytes: Annotated[int, _most("bytes of a constraint's regular expression")] = 8 << 10
    schema_bytes: Annotated[int, _most("bytes of a constraint's schema")] = 64 << 10
    choices: Annotated[int, _most("choices of a constraint")] = 1024
    compile_ms: Annotated[int, _most("milliseconds to compile a constraint")] = 10_000
    open_timeout_s: Annotated[
        int, _most("seconds until `open` must have come", flag="--limit-open-timeout-s")
    ] = 5
    # a client has as many ops under way
    replies_kept: Annotated[int, _most("replies of a client that are kept, to be sent again")] = 1024
    replies_bytes: Annotated[int, _most("bytes of those")] = 1 << 20
    # with gateway processes each has its share of a client's
    session_bytes: Annotated[int, _most("bytes of host memory that a session may hold")] = 1 << 28
    queued_op_bytes: Annotated[int, _most("bytes of a session's ops that wait or run")] = 1 << 24
    session_meta_bytes: Annotated[int, _most("bytes of all `meta` of a session, as JSON")] = 1 << 18
    tree_bytes: Annotated[int, _most("bytes of one answer to `tree`, about; the next one goes on")] = (
        1 << 18
    )
    client_sessions: Annotated[int, _most("sessions of one token's name")] = 1024
    client_bytes: Annotated[int, _most("bytes of host memory that those may hold")] = 1 << 30

    @lru_cache(maxsize=64)  # noqa: B019 - of few values, which are frozen
    def wire(self) -> dict[str, int]:
        """The limits as `state.limits` shows them. Not to be changed."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]
