"""The layout of the CUDA executor's steps, each in a frame of pinned memory that is sent in one copy.

A step that a graph holds is padded to the graph's bucket, and its frame never moves. Any other step has
a frame of its own size. This file does not know the model, nor how a step is launched.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.attention.groups import is_grouped
from ramify.gpu.drafting.device_drafts import DeviceDrafts
from ramify.gpu.ops.fixed_states import state_room, state_tables
from ramify.gpu.sampling.cuda_sampler import CudaSampler
from ramify.gpu.step.buckets import NOTHING, Bucket, tailored
from ramify.gpu.step.inputs import NO_DRAWS, Plan, StepFrame, lay, layout
from ramify.gpu.step.rows import RowTable, StepRows
from ramify.gpu.step.staging import Upload, frame_bytes
from ramify.gpu.vision.pictures import Pictures
from ramify.gpu.vision.placing import MOVED_TURNS, extending, lay_moved_turns
from ramify.protocol.plan import ExecutorInfo, OpenRow


class StepFrames:
    """Maker of frames. `largest`: the largest buckets of graphs. `states`: layers have fixed states."""

    def __init__(
        self,
        info: ExecutorInfo,
        table: RowTable,
        attention: AttentionBackend,
        sampler: CudaSampler,
        drafts: DeviceDrafts,
        tower: Pictures | None,
        *,
        states: bool,
        largest: Sequence[Bucket],
        device: torch.device,
    ) -> None:
        self._table, self._attention, self._sampler = table, attention, sampler
        self._drafts, self._tower = drafts, tower
        self._has_states, self._state_slots = states, info.state_slots
        # one row more than there are: padding runs in it, at position 0 of the padding slot's page
        self._spare = info.max_rows
        self._shifts = np.zeros(info.max_rows + 1, dtype=np.int64)  # of `lay_moved_turns`
        self._cuda = device.type == "cuda"
        sizes = [frame_bytes(layout(bucket, self._room(bucket))) for bucket in largest]
        self._steps = Upload(device, fixed=max(sizes))
        self._frames: dict[tuple[int, Bucket], StepFrame] = {}  # by ring entry, into `_steps`
        self._extras = Upload(device)

    def opened(self, rows: Iterable[OpenRow]) -> None:
        """Note by how much the pictures of newly opened rows shift their positions."""
        for opened in rows:
            self._shifts[opened.row] = sum(each.shift for each in opened.pictures)

    def captured(self, entry: int, step: StepRows, bucket: Bucket, late: bool) -> StepFrame:
        """Upload the step to where a graph reads it: of `bucket`, or of one of its `forms`."""
        bucket, plan = self._plan(step, bucket, captured=True)
        frame = self.graphs(entry, bucket)
        self._fill(entry, frame, step, plan, late)
        return frame

    def tailored(self, entry: int, step: StepRows, late: bool) -> StepFrame:
        """Upload the step in a frame of its own size."""
        bucket = tailored(step, self._attention.static_extends and self._cuda)
        bucket, plan = self._plan(step, bucket, captured=False)
        room = plan | self._turns_room(bucket)
        frame = StepFrame(bucket, self._extras.frame(entry, layout(bucket, room)))
        self._fill(entry, frame, step, plan, late)
        return frame

    def padding(self, bucket: Bucket) -> StepFrame:
        """Upload a step of padding to where the graph of `bucket` reads ring entry 0."""
        if self._cuda:
            torch.cuda.synchronize()  # the ring entry may be in use
        frame = self.graphs(0, bucket)
        lay(frame.host, NOTHING, NO_DRAWS, {}, self._spare)
        self._send(frame)
        return frame

    def graphs(self, entry: int, bucket: Bucket) -> StepFrame:
        """Find or make the frame from which the graph of `bucket` reads, of ring entry `entry`."""
        frame = self._frames.get((entry, bucket))
        if frame is None:
            fields = layout(bucket, self._room(bucket))
            frame = StepFrame(bucket, self._steps.frame(entry, fields))
            self._frames[entry, bucket] = frame
        return frame

    def _plan(self, step: StepRows, bucket: Bucket, captured: bool) -> tuple[Bucket, Plan]:
        """Plan attention and states. Returns the bucket, grouped or drafted if it is, and the plan."""
        plan = self._attention.plan(step, bucket, captured)
        if plan and not step.extends:
            drafted = step.lines is not None
            bucket = replace(bucket, grouped=is_grouped(plan), drafted=drafted)
        return bucket, plan | state_tables(step, bucket, self._state_slots + 1)

    def _room(self, bucket: Bucket) -> Plan:
        """Make a plan of zeros, as large as one of `bucket` can be."""
        room = self._attention.room(bucket)
        room = room | state_room(bucket) if self._has_states else room
        return room | self._turns_room(bucket)

    def _turns_room(self, bucket: Bucket) -> Plan:
        """Make zeros for the three positions of each token, where the model has M-RoPE."""
        if self._tower is None or not self._tower.turned:
            return {}
        return {MOVED_TURNS: np.zeros((3, bucket.lines), dtype=np.int32)}

    def _fill(self, entry: int, frame: StepFrame, step: StepRows, plan: Plan, late: bool) -> None:
        draws = self._sampler.draws_for(step.rows[step.sampling], step.draws)
        lay(frame.host, step, draws, plan, self._spare)
        if self._table.pictures and self._tower is not None and self._tower.turned:
            host, extended = frame.host, extending(step, self._table.pictures)
            moved = host.plan[MOVED_TURNS]
            lay_moved_turns(moved, host.rows, host.positions, self._shifts, extended)
        self._drafts.lay(entry, frame.host, step, late, self._sampler.seeds)
        self._send(frame)

    def _send(self, frame: StepFrame) -> None:
        frame.send()
        if not frame.host.extended:
            self._attention.plan_decodes(frame.host.rows, frame.host.positions)
