"""Who may come to a session, and what is kept of each client: ids with replies, declared tools. Pure."""

import base64
import copy
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.kit.memory import JSON, Held, Meter, reply_bytes
from ramify.actors.session.branches.segments import SavedNumber
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from ramify.protocol.saved import key_hash, same_key
from ramify.protocol.wire import JsonObject, Open, ServerMessage


class Identity:
    """The public id and the keys of a session. `key`: "" until somebody who knows it has come.

    The view key follows from the key, so whoever may write can always hand it on, and a store needs only
    hashes of both.
    """

    def __init__(self, session: str, key: str, *, hashes: tuple[bytes, bytes] | None = None) -> None:
        self.session = session
        self.key = key
        self.hashes = hashes or (key_hash(key), key_hash(view_key(key)))
        self._view_key = "" if not key else view_key(key)

    @staticmethod
    def new(prefix: str) -> "Identity":
        """Make the identity of a new session, whose id begins with `prefix`."""
        return Identity(f"{prefix}{secrets.token_urlsafe(9)}", f"k_{secrets.token_urlsafe(18)}")

    @property
    def view_key(self) -> str:
        """ "" while nobody has come."""
        return self._view_key

    def opens(self, key: str) -> bool:
        """Whether `key` is the session's. If so, it is remembered."""
        if not same_key(key, self.hashes[0]):
            return False
        if not self.key:
            self.key, self._view_key = key, view_key(key)
        return True

    def shows(self, key: str) -> bool:
        """Whether `key` is the view key. If so, it is remembered."""
        if not same_key(key, self.hashes[1]):
            return False
        self._view_key = key
        return True


def view_key(key: str) -> str:
    """Derive the view key of a session from its key."""
    digest = hmac.digest(key.encode(), b"view", hashlib.sha256)
    return f"v_{base64.urlsafe_b64encode(digest[:18]).decode()}"


class ReplyLog:
    """The op ids and terminal replies of one client of one session, and the tools it has declared."""

    def __init__(self, limits: Limits, meter: Meter) -> None:
        self.held = 0  # bytes of `replies`
        self.last = -1  # the highest op id seen
        self.declared: Declared | None = None  # before its first `open`
        self.replies: OrderedDict[int, list[ServerMessage]] = OrderedDict()
        self._limits = limits
        self._meter = meter
        self._pending: dict[int, int] = {}  # op id -> terminal replies still to come
        self.changed: set[int] | None = (
            None  # ops with replies that a store lacks; None: all, or no store
        )

    @property
    def highest(self) -> int:
        """The highest op id, as `state.op` shows it; 0 before the first op."""
        return max(self.last, 0)

    @property
    def due(self) -> dict[int, int]:
        """By op id, how many terminal replies are still to come."""
        return self._pending

    def restore(self, last: int, due: dict[int, int], replies: dict[int, list[ServerMessage]]) -> None:
        """Restore what another server has kept."""
        self.last, self._pending = last, dict(due)
        for ident in sorted(replies):
            self.replies[ident] = replies[ident]
            self._hold(sum(map(reply_bytes, replies[ident])))

    @property
    def idle(self) -> bool:
        """Whether every op has its replies."""
        return not self._pending

    def admit(self, ids: list[int]) -> None:
        """Check that new ids increase. Raises BadRequest; nothing is recorded."""
        last = self.last
        for ident in ids:
            if ident <= self.last:
                continue  # sent again: `seen` says what happens
            if ident <= last:
                raise BadRequest(
                    f"id {ident} follows id {last}: ids must increase; the frame was refused",
                    details={"id": ident, "last": last},
                )
            last = ident

    def seen(self, ident: int) -> list[ServerMessage] | None:
        """Return the replies so far to an op that was seen: none while it waits or runs. None: a new id.

        Raises BadRequest if it was answered too long ago.
        """
        if ident > self.last:
            return None
        if ident in self.replies:
            return self.replies[ident]
        if ident in self._pending:
            return []
        raise BadRequest(
            f"id {ident} is not new (the last was {self.last}) and its reply is no longer kept: "
            "use a higher id",
            details={"last": self.last},
        )

    def begin(self, ident: int, replies: int) -> None:
        """Note a new op, which will get `replies` terminal replies."""
        self.last = ident
        self._pending[ident] = replies

    def waits(self, ident: int) -> bool:
        """Whether terminal replies of this op are still to come."""
        return ident in self._pending

    def record(
        self, ident: int, message: ServerMessage, *, keep: bool = True, saved: bool = True
    ) -> None:
        """Note a terminal reply. `keep`: it can be sent again; `saved`: by a later server, too."""
        if keep:
            self.replies.setdefault(ident, []).append(message)
            self._hold(reply_bytes(message))
            if self.changed is not None and saved:
                self.changed.add(ident)
        left = self._pending.get(ident, 1) - 1
        if left > 0:
            self._pending[ident] = left
        else:
            self._pending.pop(ident, None)
        limits = self._limits
        while len(self.replies) > limits.replies_kept or (
            self.held > limits.replies_bytes and len(self.replies) > 1
        ):
            old, gone = self.replies.popitem(last=False)
            self._hold(-sum(map(reply_bytes, gone)))
            if self.changed is not None:
                self.changed.add(old)

    def drop(self, ident: int) -> None:
        """Forget an op that will not be answered. The client may send it again."""
        self._pending.pop(ident, None)

    def forget(self) -> None:
        """Forget the client."""
        self._meter.add(-self.held)

    def _hold(self, count: int) -> None:
        self.held += count
        self._meter.add(count)


_encode = msgspec.json.Encoder().encode


class Declared(Held):
    """The `tools` of a client, kept for its next `open`, which need not bring them.

    They were checked when they came, and count once, however many clients have them.

    `size`: as JSON; `saved`: once a store has them.
    """

    __slots__ = ("_text", "_toolbox", "saved", "size", "tools")

    def __init__(self, tools: Sequence[JsonObject] | None, meter: Meter) -> None:
        self.tools = list(tools or ())
        self.saved: SavedNumber | None = None
        self._text = _encode(self.tools) if self.tools else b""
        self._toolbox: Toolbox | None = None  # made when it is wanted: there may be thousands
        self.size = len(self._text)
        self.charge(meter, JSON * self.size)

    @property
    def toolbox(self) -> Toolbox:
        """What counts as a call of them."""
        if self._toolbox is None:
            self._toolbox = Toolbox(self.tools)
        return self._toolbox

    @property
    def names(self) -> list[str]:
        """The names of the tools, as `state` shows them."""
        return [tool.get("function", tool)["name"] for tool in self.tools]

    def same(self, other: "Declared") -> bool:
        """Whether both are the same tools, byte by byte."""
        return self._text == other._text

    def into(self, opened: Open) -> Open:
        """Make a copy of `opened` with these tools."""
        opened = copy.copy(opened)  # `replace` would check the tools again
        msgspec.structs.force_setattr(opened, "tools", self.tools or None)
        return opened


def in_force(opened: Open, own: Declared | None, last: Declared | None, meter: Meter) -> Declared:
    """Choose the tools of a client that opens a session.

    One that resumes and names none keeps its `own`; where it is not known, it takes those of the client
    that opened the session `last`. An empty list drops them.
    """
    known = own or last
    if opened.tools is None and opened.session is not None and known is not None:
        return known
    declared = Declared(opened.tools, meter)
    return known if known is not None and known.same(declared) else declared
