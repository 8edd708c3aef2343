"""The tools that a client has declared, kept for its next `open`, which need not bring them. Pure."""

import copy
from collections.abc import Sequence

import msgspec

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.kit.memory import JSON, Held, Meter
from ramify.actors.session.branches.segments import Saved
from ramify.protocol.wire import JsonObject, Open

_encode = msgspec.json.Encoder().encode


class Declared(Held):
    """`tools`, which were checked when they came. They count once, however many clients have them.

    `size`: as JSON; `saved`: once a store has them.
    """

    __slots__ = ("_text", "_toolbox", "saved", "size", "tools")

    def __init__(self, tools: Sequence[JsonObject] | None, meter: Meter) -> None:
        self.tools = list(tools or ())
        self.saved: Saved | None = None
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
        """As `state` shows them."""
        return [tool.get("function", tool)["name"] for tool in self.tools]

    def same(self, other: "Declared") -> bool:
        """Whether both are the same tools, to the letter."""
        return self._text == other._text

    def into(self, opened: Open) -> Open:
        """`opened`, with these tools."""
        opened = copy.copy(opened)  # `replace` would check the tools again
        msgspec.structs.force_setattr(opened, "tools", self.tools or None)
        return opened


def in_force(opened: Open, own: Declared | None, last: Declared | None, meter: Meter) -> Declared:
    """The tools of a client that opens a session.

    One that resumes and names none keeps its `own`; where it is not known, it takes those of the client
    that opened the session `last`. An empty list drops them.
    """
    known = own or last
    if opened.tools is None and opened.session is not None and known is not None:
        return known
    declared = Declared(opened.tools, meter)
    return known if known is not None and known.same(declared) else declared
