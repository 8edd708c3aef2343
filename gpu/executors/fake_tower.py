"""The fake executor's vision tower: takes time, and encodes nothing.

It knows no pixels. It checks what the real tower relies on: no picture is encoded twice or forgotten
twice, and no step shows a picture that is not kept.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf

from ramify.gpu.step.rows import PlanError
from ramify.gpu.step.step_rows import StepRows
from ramify.protocol.pictures import PlacedPicture
from ramify.protocol.plan import PicturesSeen, StepPlan

_SIGN_SECONDS = 1.0


class FakeTower:
    def __init__(self, seconds: float) -> None:
        """`seconds`: time of each picture, one after another; inf: the tower hangs."""
        self._seconds = seconds
        self._under_way: deque[tuple[float, bytes]] = deque()  # when it is ready
        self.kept: set[bytes] = set()
        self.looks = 0
        self.faults = 0  # of so many pictures it fails next
        self._sign_at = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def take(self, plan: StepPlan) -> None:
        for key in plan.unseen:
            if key not in self.kept:
                raise PlanError("a picture is forgotten that is not kept")
            self.kept.remove(key)
        now = time.perf_counter()
        if plan.looks and not self._under_way:
            self._sign_at = now + _SIGN_SECONDS
        for look in plan.looks:
            if look.key in self.kept or any(look.key == key for _, key in self._under_way):
                raise PlanError("a picture is looked at twice")
            last = self._under_way[-1][0] if self._under_way else now
            self._under_way.append((max(now, last) + self._seconds, look.key))
            self.looks += 1

    def seen(self) -> PicturesSeen | None:
        now = time.perf_counter()
        keys, failed = list[bytes](), list[bytes]()
        while self._under_way and self._under_way[0][0] <= now:
            _, key = self._under_way.popleft()
            (failed if self.faults else keys).append(key)
            self.faults = max(0, self.faults - 1)
        self.kept.update(keys)
        if not keys and not failed and now < self._sign_at:
            return None
        self._sign_at = now + _SIGN_SECONDS
        layers = self.looks if self._seconds == inf else int(1000 * now)
        return PicturesSeen(keys, failed, "it is a fault" if failed else "", layers)

    def check(self, step: StepRows, pictures: Mapping[int, Sequence[PlacedPicture]]) -> None:
        """Check the pictures of a step. Raises PlanError if it shows one that is not kept."""
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            for each in pictures.get(int(row), ()):
                if each.start < start + count and start < each.stop and each.key not in self.kept:
                    raise PlanError("the step shows a picture that is not kept")
