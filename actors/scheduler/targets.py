"""The tokens that a request wants scored, and their scores so far.

A target is planned with the chunk that runs its place, and its score comes with that chunk's result. A
retracted run goes on at the first target without a score: planned targets whose results did not come
back fall away with the run, so none is lost and none comes twice.
"""

from array import array
from bisect import bisect_left

from ramify.protocol.messages import Submit
from ramify.protocol.plan import pack, unpack


class Targets:
    """`scores`: of the first targets, `width` numbers each; see `StepResult`."""

    __slots__ = ("_lines", "_places", "_targets", "scores", "tops", "width")

    def __init__(self, places: "array[int]", targets: "array[int]", tops: int = 0) -> None:
        self.tops = tops
        self.width = 1 + 2 * tops
        self._places = places
        self._lines = array("i", dict.fromkeys(places))
        self._targets = targets
        self.scores: array[float] = array("f")

    @property
    def end(self) -> int:
        """The position behind the last place."""
        return self._places[-1] + 1

    @property
    def done(self) -> int:
        """Targets that have their scores."""
        return len(self.scores) // self.width

    @property
    def rerun(self) -> int | None:
        """The first place that has to run still, or None."""
        done = self.done
        return self._places[done] if done < len(self._places) else None

    def lines(self, start: int, end: int) -> int:
        """Positions in [start, end) that need logits; one may have many targets."""
        return bisect_left(self._lines, end) - bisect_left(self._lines, start)

    def take(self, first: int, end: int) -> tuple[bytes, bytes, int]:
        """Places and targets from number `first` on with places below `end`; and the next number."""
        stop = bisect_left(self._places, end, first)
        return pack(self._places[first:stop]), pack(self._targets[first:stop]), stop


def targets_of(submit: Submit, vocab_size: int) -> Targets | None:
    """The request's targets, or None. Raises ValueError for targets that executors cannot run."""
    if not submit.places and not submit.targets:
        return None
    places, targets = unpack(submit.places), unpack(submit.targets)
    if submit.max_tokens or len(places) != len(targets):
        raise ValueError("targets need a place each, and no output")
    if min(places) < 0 or max(places) >= submit.prompt or list(places) != sorted(places):
        raise ValueError(f"places must ascend and be below {submit.prompt}")
    if min(targets) < 0 or max(targets) >= vocab_size:
        raise ValueError(f"targets must be tokens below {vocab_size}")
    if not 0 <= submit.tops <= vocab_size:
        raise ValueError(f"tops is {submit.tops}, of {vocab_size} tokens")
    return Targets(places, targets, submit.tops)
