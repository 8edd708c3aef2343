"""The pictures of an executor: a tower that runs beside the steps, and the vectors of each picture.

The tower has a thread of its own: on a GPU also a stream, on a CPU a lower priority than the steps.
Pictures of one size run together. Vectors lie on the model's device until they are forgotten; the
scheduler says which pictures are looked at and which are forgotten (`StepPlan.looks`).
"""

import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from ramify.gpu.ops.base import ShownPictures
from ramify.gpu.step.rows import PlanError
from ramify.gpu.step.staging import Array
from ramify.gpu.vision.patches import Patches
from ramify.gpu.vision.placing import RowPictures, lines_of
from ramify.gpu.vision.tower import Tower
from ramify.protocol.pictures import Picture, PictureLook, PictureSettings
from ramify.protocol.plan import ExecutorInfo, PicturesSeen, StepPlan

ROOM = 512 << 20  # bytes of the vectors
_TOGETHER = 1 << 14  # patches that run at once on a GPU, or one picture; a CPU gains nothing by more
_SIGN_SECONDS = 1.0
_END_SECONDS = 5.0
_NICE = 10  # the tower's threads on a CPU: beside a step they get a tenth


class Pictures:
    """The tower and its vectors. Used by the executor's thread; the first picture starts the tower's."""

    def __init__(self, tower: Tower, settings: PictureSettings) -> None:
        self.turned = tower.settings.turned
        self.settings = settings
        self.tower = tower
        self._cuda = tower.device.type == "cuda"
        self._patches = Patches(settings, tower.settings.frames, tower.device)
        self._kept: dict[bytes, Tensor] = {}
        self._under_way: set[bytes] = set()
        self._asked: queue.SimpleQueue[PictureLook | None] = queue.SimpleQueue()
        self._made: deque[tuple[bytes, Tensor | str]] = deque()  # or why it failed
        self._thread: threading.Thread | None = None
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(tower.device) if self._cuda else None
        self._sign_at = 0.0

    def described(self, info: ExecutorInfo) -> ExecutorInfo:
        """Return `info` with the facts about pictures that the scheduler needs."""
        each = self.tower.settings.width * self.tower.dtype.itemsize
        return replace(info, pictures=self.settings, picture_bytes=each, picture_room=ROOM)

    @property
    def busy(self) -> bool:
        """Whether the tower runs, or `seen` has news."""
        return bool(self._under_way)

    def take(self, plan: StepPlan) -> None:
        """Forget and look at pictures by the plan. Raises PlanError if it contradicts earlier ones."""
        for key in plan.unseen:
            if self._kept.pop(key, None) is None:
                raise PlanError(f"step {plan.step} forgets a picture that is not kept")
        for look in plan.looks:
            if look.key in self._kept or look.key in self._under_way:
                raise PlanError(f"step {plan.step} looks at a picture twice")
            if not self._under_way:
                self._sign_at = time.monotonic() + _SIGN_SECONDS
            self._under_way.add(look.key)
            self._asked.put(look)
        if plan.looks and self._thread is None:
            self._thread = threading.Thread(target=self._look, name="ramify-tower", daemon=True)
            self._thread.start()

    def seen(self) -> PicturesSeen | None:
        """Report on pictures since the last call; empty: the tower runs; None: nothing to report."""
        said = PicturesSeen(layers=self.tower.layers_run)
        while self._made:
            key, made = self._made.popleft()
            self._under_way.remove(key)
            if isinstance(made, Tensor):
                self._kept[key] = made
                said.keys.append(key)
            else:
                said.failed.append(key)
                said = replace(said, reason=made)
        now = time.monotonic()
        if not said.keys and not said.failed and now < self._sign_at:
            return None
        self._sign_at = now + _SIGN_SECONDS
        return said

    def shown(self, rows: Array, positions: Array, pictures: RowPictures) -> ShownPictures | None:
        """Collect the vectors that replace the embedding in a step; None: it shows no picture.

        Raises PlanError where a picture is not kept.
        """
        found = list(lines_of(rows, positions, pictures))
        if not found:
            return None
        values = []
        for each in found:
            made = self._kept.get(each.placed.key)
            if made is None:
                raise PlanError("the step shows a picture that is not kept")
            if self._cuda:  # its memory is the tower's stream's
                made.record_stream(torch.cuda.current_stream(self.tower.device))
            values.append(made[each.offsets[0] : each.offsets[-1] + 1])  # of a row's lines, in order
        lines = torch.cat([torch.from_numpy(each.lines) for each in found])
        if self._cuda:
            lines = lines.pin_memory().to(self.tower.device, non_blocking=True)
        return ShownPictures(lines, values[0] if len(values) == 1 else torch.cat(values))

    def rehearse(self) -> None:
        """Allocate the memory of the tower's largest run, and of all vectors that are kept."""
        settings, unit = self.settings, self.settings.unit
        side = max(1, math.isqrt(settings.most) // unit) * unit
        black = Picture(side, side, bytes(3 * side * side))
        most = max(1, _TOGETHER * settings.patch**2 // side**2)
        made = self._run([black] * most)
        each = made.nbytes // most  # as pieces of that size, so that the allocator has them
        with torch.cuda.stream(self._stream):
            kept = [
                torch.empty(each, dtype=torch.uint8, device=made.device) for _ in range(ROOM // each)
            ]
        del kept

    def close(self) -> None:
        """End the tower's thread, and forget all. The object may be used again."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(_END_SECONDS)
            self._thread = None
        self._kept.clear()

    # --- the tower's thread ---

    def _look(self) -> None:
        if not self._cuda and sys.platform == "linux":
            with suppress(OSError):  # where that is forbidden it runs as others do
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        waiting: list[PictureLook] = []
        while True:
            while not waiting or not self._asked.empty():
                look = self._asked.get()
                if look is None:
                    return
                waiting.append(look)
            batch = waiting[:1]
            try:
                batch = self._batch(waiting)
                outputs = self._made_of([look.picture for look in batch])
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:200]
                self._made.extend((look.key, said) for look in batch)
            else:
                self._made.extend(zip((look.key for look in batch), outputs, strict=True))
            waiting = [look for look in waiting if look not in batch]

    def _batch(self, waiting: Sequence[PictureLook]) -> list[PictureLook]:
        """Take the oldest, and those of its size: up to `_TOGETHER` at once."""
        rows, columns = grid = self._patches.grid(waiting[0].picture)
        most = max(1, _TOGETHER // (rows * columns)) if self._cuda else 1
        return [look for look in waiting if self._patches.grid(look.picture) == grid][:most]

    def _run(self, batch: Sequence[Picture]) -> Tensor:
        """Run the tower on pictures of one size: [B, tokens, 1 + deep, output] on the device."""
        rows, columns = self._patches.grid(batch[0])
        with self._beside():
            patches = torch.stack([self._patches.cut(each) for each in batch])
            return self.tower.forward(patches, rows, columns)

    def _made_of(self, batch: Sequence[Picture]) -> list[Tensor]:
        """Run the tower. Returns each picture's vectors in memory of its own, to be freed alone."""
        made = self._run(batch)
        with self._beside():  # a copy on another stream would not wait for the tower
            outputs = [each.clone() for each in made] if len(batch) > 1 else [made[0]]
        if self._stream is not None:
            self._stream.synchronize()
        return outputs

    def _beside(self) -> Any:
        """Enter the tower's stream, where it has one."""
        return torch.cuda.stream(self._stream) if self._cuda else nullcontext()
