"""A `prune` by "first" that waits: which of its sources have finished, in which order. Pure.

A source has finished when all that was queued on it before the prune is done. Sources that finish at the
same time keep the order in which the op names them. A source whose generation did not come to its own
end (it was cancelled, its deadline passed, or there was none) comes behind all others.
"""

from collections.abc import Collection, Sequence


class Race:
    """`decided`: the winners, the best first, once they are known. `into`: where they will go."""

    __slots__ = ("_into", "_others", "_places", "_through", "_winners", "decided")

    def __init__(self, sources: Sequence[str], into: Sequence[str], winners: int) -> None:
        self.decided: list[str] | None = None
        self._places = {name: i for i, name in enumerate(sources)}
        self._into = frozenset(into)
        self._others = set(into) - set(sources)  # what else the prune waits for
        self._winners = winners
        self._through: dict[str, tuple[bool, float]] = {}

    def through(self, name: str, now: float, *, whole: bool) -> None:
        """The prune is first in the queue of the branch. `whole`: a generation came to its end."""
        if name in self._places:
            self._through.setdefault(name, (not whole, now))
        self._others.discard(name)

    def decide(self, failed: Collection[str]) -> bool:
        """Whether there are enough winners now, and nobody has said so before."""
        if self._others or self.decided is not None or len(self._through) < self._winners:
            return False
        if not self._into.isdisjoint(failed):  # it will be skipped
            return False
        through = [name for name in self._through if name not in failed]
        over = len(self._through) == len(self._places)
        enough = len(through) if over else sum(not self._through[name][0] for name in through)
        if enough < self._winners:
            return False
        through.sort(key=lambda name: (*self._through[name], self._places[name]))
        self.decided = through[: self._winners]
        return True

    @property
    def losers(self) -> list[str]:
        """In the order in which the op names them."""
        won = set(self.decided or ())
        return [name for name in self._places if name not in won]
