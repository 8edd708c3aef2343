"""The number of replicas that are needed, by their queues and by how late first tokens are. Pure.

More when first tokens have been later than the target, or will be, for some seconds; fewer when one
replica less would still be far from that, for some minutes. A replica takes its time to start, so no
other one is asked for meanwhile. Times are seconds that the caller passes in.
"""

import math
from collections import deque

from ramify.protocol.cluster import ReplicaLoad

UP_S, DOWN_S = 5.0, 180.0  # for how long it has to be so
RECENT_S, ENOUGH = 30.0, 8  # of which first tokens there have to be so many
MOST_KEPT = 4096
MOST_STEP = 0.5  # of the replicas that there are, so many more at once
CALM, ROOM = 0.25, 0.6  # with one less: share of the target, share of the KV slots that are held
_RATE = 20_000.0  # prompt tokens a second, until a replica has measured


class Scaling:
    """Between `least` and `most` replicas. `target_s`: of the time to first token."""

    def __init__(self, least: int, most: int, target_s: float) -> None:
        self.least, self.most, self.target_s = least, most, target_s
        self._first: deque[tuple[float, float]] = deque(maxlen=MOST_KEPT)  # (when, how late)
        self._late_since: float | None = None
        self._calm_since: float | None = None

    def first_token(self, seconds: float, now: float) -> None:
        """A request had its first token after so long."""
        self._first.append((now, seconds))

    def ttft(self, now: float) -> float:
        """The time that nine of ten first tokens of late took; 0.0: too few are known."""
        while self._first and self._first[0][0] < now - RECENT_S:
            self._first.popleft()
        if len(self._first) < ENOUGH:
            return 0.0
        late = sorted(seconds for _, seconds in self._first)
        return late[int(0.9 * (len(late) - 1))]

    def wanted(self, loads: list[ReplicaLoad], coming: int, now: float) -> int:
        """The number of replicas that are needed. `loads`: of the ready ones; `coming`:
        being started.
        """
        ready = len(loads)
        if not ready:
            return max(self.least, coming)
        there = ready + coming
        wait = sum(each.queued / (each.prefill_rate or _RATE) for each in loads) / ready
        late = max(wait, self.ttft(now)) / self.target_s
        full = all(each.waiting for each in loads)
        if (late > 1.0 or full) and there < self.most:
            self._calm_since = None
            if self._late_since is None:
                self._late_since = now
            if coming or now - self._late_since < UP_S:
                return max(self.least, there)
            self._late_since = None
            more = min(max(late - 1.0, 0.0), MOST_STEP) * ready
            return min(self.most, there + max(1, math.ceil(more)))
        self._late_since = None
        if ready > self.least and not coming and self._relaxed(loads, late):
            if self._calm_since is None:
                self._calm_since = now
            if now - self._calm_since >= DOWN_S:
                self._calm_since = None
                return ready - 1
        else:
            self._calm_since = None
        return min(self.most, max(self.least, there))

    def _relaxed(self, loads: list[ReplicaLoad], late: float) -> bool:
        """Whether one replica less would do."""
        share = len(loads) / (len(loads) - 1)
        held = sum(each.slots - each.free - each.evictable for each in loads)
        room = sum(each.slots for each in loads)
        busy = held / room if room else 0.0
        return late * share < CALM and busy * share < ROOM and not any(each.waiting for each in loads)
