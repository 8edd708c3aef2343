"""Sessions that make room for newer ones: those of stored responses, which nobody closes.

Where they are half of the sessions that their owner may have, or the owner's sessions are almost out
of bytes, a new one displaces the one that nobody has used for longest.

Pure. It does not know what a session is.
"""

from collections.abc import Callable, Iterator

from ramify.actors.session.limits.meter import Budget

SHARE = 2  # half of the sessions an owner may have
ALMOST = 7 / 8  # of the bytes
AT_ONCE = 4  # go for one that comes, at most: where the bound was lowered, or bytes are short
LOOKED_AT = 64  # at most, from the oldest on: those in use are passed over


class Displacement:
    """The sessions by owner, longest unused first."""

    def __init__(self) -> None:
        self._by_owner: dict[str, dict[str, None]] = {}

    def count(self, owner: str) -> int:
        """How many there are."""
        return len(self._by_owner.get(owner, ()))

    def use(self, owner: str, session: str) -> None:
        """Note a use: the owner's other sessions are older now."""
        sessions = self._by_owner.setdefault(owner, {})
        sessions.pop(session, None)
        sessions[session] = None

    def drop(self, owner: str, session: str) -> None:
        """Forget a session that has ended."""
        sessions = self._by_owner.get(owner)
        if sessions is not None:
            sessions.pop(session, None)
            if not sessions:
                del self._by_owner[owner]

    def make_room(self, owner: str, budget: Budget, in_use: Callable[[str], bool]) -> Iterator[str]:
        """Take out, and name, the sessions that have to go before another one begins."""
        most = max(1, budget.most_sessions // SHARE)
        sessions = self._by_owner.get(owner, {})
        much = budget.held > ALMOST * budget.most
        over = max(len(sessions) + 1 - most, 1 if much else 0)
        old = [name for _, name in zip(range(LOOKED_AT), sessions, strict=False) if not in_use(name)]
        for name in old[: min(over, AT_ONCE)]:
            self.drop(owner, name)
            yield name
