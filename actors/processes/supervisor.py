"""Keeps a process: one after the other, with pauses, until none is wanted or another one is useless.

`Attempts` is the policy, and pure: how long to wait, when to give up, and what is said then. `keep` is
the shell around it. Neither knows what runs, nor how it is started.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from ramify.actors.kit.log import get_log
from ramify.actors.processes.messages import NotStarted

log = get_log(__name__)


class Ended(NamedTuple):
    """A process has ended. `served`: it had started, and did what it is for."""

    why: str
    served: bool


@dataclass(frozen=True)
class Policy:
    """How often a process is started again. None: as often as it ends."""

    trials: int | None = 4  # starts in a row that may fail before one has ever served
    attempts: int | None = 4  # the same afterwards
    first: float = 0.5  # seconds of the first pause; each is twice the one before
    most: float = 30.0  # seconds of the longest pause
    steady: float = 0.0  # seconds that one has to run, or it counts as a start that failed


class BackOff:
    """Pauses of `first` seconds up to `most`. `failures`: in a row."""

    def __init__(self, first: float, most: float = 30.0) -> None:
        self.failures = 0
        self._first = self._next = first
        self._most = most

    def succeeded(self) -> None:
        """The next pause is short again."""
        self.failures = 0
        self._next = self._first

    def failed(self) -> float:
        """One more has failed. Returns the seconds to wait before the next."""
        self.failures += 1
        pause = min(self._next, self._most)
        self._next = 2 * pause
        return pause


class Attempts:
    """The starts of one process. `what` it is, in words."""

    def __init__(self, what: str, policy: Policy) -> None:
        self.what = what
        self._policy = policy
        self._pauses = BackOff(policy.first, policy.most)
        self._proven = False

    def ended(self, ended: Ended, seconds: float, *, proven: bool = False) -> float:
        """It ran for `seconds`. Returns those to wait before the next start; 0.0 if it had served.

        `proven`: others of its kind have served. Raises NotStarted where another start is useless.
        """
        if ended.served and seconds >= self._policy.steady:
            self._proven = True
            self._pauses.succeeded()
            return 0.0
        pause = self._pauses.failed()
        if self._pauses.failures == self._most(proven):
            times = self._pauses.failures
            how = "did not start" if times == 1 else f"could not be started {times} times in a row; last"
            raise NotStarted(f"{self.what} {how}: {ended.why}")
        return pause

    def next(self, *, proven: bool = False) -> str:
        """Which start comes next, for people."""
        most = self._most(proven)
        return f"{self._pauses.failures + 1}{'' if most is None else f' of {most}'}"

    def _most(self, proven: bool) -> int | None:
        return self._policy.attempts if proven or self._proven else self._policy.trials


class Deaths:
    """Counts deaths: more than `most` of them `within` so many seconds are too many. Pure."""

    def __init__(self, most: int, within: float) -> None:
        self.times: deque[float] = deque(maxlen=most + 1)
        self._most = most
        self._within = within

    def too_many(self, now: float) -> bool:
        """One more, now."""
        self.times.append(now)
        return len(self.times) > self._most and now - self.times[0] < self._within


async def keep(
    run: Callable[[], Awaitable[Ended]],
    attempts: Attempts,
    *,
    stop: asyncio.Event | None = None,
    wanted: Callable[[], bool] = lambda: True,
    proven: Callable[[], bool] = lambda: False,
) -> None:
    """Run one process after the other, until `stop` or as long as they are `wanted`.

    `run` starts one and returns when it has ended; OSError: the system could not start it. `proven`: see
    `Attempts`. Raises NotStarted, and what `run` raises otherwise.
    """
    stop = stop or asyncio.Event()
    while wanted() and not stop.is_set():
        since = anyio.current_time()
        try:
            ended = await run()
        except OSError as error:  # no memory, no process, no file is left for it
            ended = Ended(str(error), False)
        if stop.is_set() or not wanted():
            return
        pause = attempts.ended(ended, anyio.current_time() - since, proven=proven())
        if pause:
            attempt = attempts.next(proven=proven())
            log.warning(
                "it starts again soon",
                process=attempts.what,
                attempt=attempt,
                pause_s=pause,
                reason=ended.why,
            )
            with anyio.move_on_after(pause):
                await stop.wait()
