"""The constraints that outputs of a session stand under, each kept once. Pure.

An output that was cut, or a fork in its middle, can be continued under its constraint. So segments name
it: by a `Rule`, which all outputs under the same constraint share.
"""

from typing import TYPE_CHECKING

from ramify.actors.kit.memory import SEGMENT, Held
from ramify.protocol.saved import SavedRule

if TYPE_CHECKING:
    from ramify.actors.session.branches.branch import Saved  # which imports segments, and these this


class Rule(Held):
    """`what`: the constraint. `saved`: once a store has it."""

    __slots__ = ("__weakref__", "saved", "what")

    def __init__(self, what: SavedRule) -> None:
        self.what = what
        self.saved: Saved | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return SEGMENT + len(self.what.spec.text)
