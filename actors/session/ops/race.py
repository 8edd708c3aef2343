"""Who is through first: the sources of a `prune` by "first" that waits. Pure.

A source is through when all that was queued on it before the prune is done. Sources that are through at
the same moment are in the order in which the op names them; one whose generation did not come to its end
(it was cancelled, its deadline passed) comes behind all others.
"""

from collections.abc import Collection, Sequence


class Race:
    """`decided`: the winners, the best first, once they are known."""

    __slots__ = ("_others", "_places", "_through", "_winners", "decided")

    def __init__(self, sources: Sequence[str], touched: Collection[str], winners: int) -> None:
        self.decided: list[str] | None = None
        self._places = {name: i for i, name in enumerate(sources)}
        self._others = set(touched) - set(sources)  # what else the prune waits for
        self._winners = winners
        self._through: dict[str, tuple[bool, float]] = {}

    def through(self, name: str, now: float, *, whole: bool) -> None:
        """The prune is first in the queue of the branch. `whole`: its generation came to its end."""
        if name in self._places:
            self._through.setdefault(name, (not whole, now))
        self._others.discard(name)

    def decide(self, failed: Collection[str]) -> bool:
        """Whether there are enough winners now, and nobody has said so before."""
        if self._others or self.decided is not None:
            return False
        through = [name for name in self._through if name not in failed]
        over = len(self._through) == len(self._places)
        if len(through) < self._winners or not (
            over or sum(not self._through[name][0] for name in through) >= self._winners
        ):
            return False
        through.sort(key=lambda name: (*self._through[name], self._places[name]))
        self.decided = through[: self._winners]
        return True

    @property
    def losers(self) -> set[str]:
        return self._places.keys() - (self.decided or ())
