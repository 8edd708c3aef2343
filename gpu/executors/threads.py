"""The choice between all CPU threads for a step and half of them, while the machine is crowded.

A parallel region ends when its slowest thread does. If other processes use the cores, a thread that is
not running holds up the others, which spin meanwhile. A step of a small model has hundreds of such
regions. On 2 cores with a load of 6, a decode step of a 30M model took 50 to 800 ms on two threads and
10 ms on one; on the idle machine 4.6 and 5.8 ms. Making OpenMP sleep instead of spin costs more than
half the speed where the machine is idle. So the two numbers of threads are timed against each other.
The faster one is used, and the other one is tried now and then, less and less often while it loses.
Steps of about the same number of tokens are compared, three at a time: a single one may have compiled
kernels for a new size, or have been held up.

Pure; it knows neither torch nor clocks.
"""

from dataclasses import dataclass, field

LARGEST = 512  # tokens: longer steps have few, long regions, and are too costly to try things on
SOONEST, LATEST = 32, 1024  # steps between trials
_SAMPLES = 3  # steps of a trial, of which the median counts
_WEIGHT = 0.2  # of a new time in the running mean
_CLIP = 4.0  # times the mean: the most that one time counts


@dataclass(slots=True)
class _Class:
    """The times of steps of one size. `seconds`: by number of threads; `wait`: steps to the next trial.

    `samples`: times of the trial under way.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    interval: int = SOONEST
    wait: int = SOONEST


class ThreadChoice:
    """Chooser between `most` threads and half of them. Call `take` and `note` for every step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._fewer = max(1, most // 2)
        self._classes: dict[int, _Class] = {}

    def take(self, tokens: int) -> int:
        """Choose the number of threads for a step of so many tokens."""
        if tokens > LARGEST or self._fewer == self._most:
            return self._most
        steps = self._classes.setdefault(tokens.bit_length(), _Class())
        for threads in (self._most, self._fewer):
            if threads not in steps.seconds:
                return threads
        best = self._best(steps)
        return best if steps.wait > 0 else self._most + self._fewer - best

    def note(self, tokens: int, threads: int, seconds: float) -> None:
        """Note how long a step took."""
        if tokens > LARGEST or self._fewer == self._most:
            return
        steps = self._classes[tokens.bit_length()]
        known = steps.seconds.get(threads)
        best = self._best(steps) if len(steps.seconds) == 2 else None
        if known is None or threads != best:
            steps.samples.append(seconds)
            if len(steps.samples) == _SAMPLES:
                steps.seconds[threads] = sorted(steps.samples)[_SAMPLES // 2]
                steps.samples.clear()
                if best is not None:  # else both are new
                    won = self._best(steps) == threads
                    steps.interval = SOONEST if won else min(2 * steps.interval, LATEST)
                    steps.wait = steps.interval
            return
        # one hiccup may change the choice, but not for long
        steps.seconds[threads] += _WEIGHT * (min(seconds, _CLIP * known) - known)
        steps.wait -= 1
        if self._best(steps) != best:
            steps.interval = steps.wait = SOONEST

    def _best(self, steps: _Class) -> int:
        return min(steps.seconds, key=lambda threads: steps.seconds[threads])
