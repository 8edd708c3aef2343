"""The interface of attention back ends: a step is planned on the host, then each layer calls `attend`.

The keys and values of a step's new tokens are stored before `attend` is called. A back end for CUDA
never waits for the device, and a CUDA graph can hold its launches for decodes.
"""

from typing import Protocol

from torch import Tensor

from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import Plan, StepInputs
from ramify.gpu.step.rows import StepRows
from ramify.gpu.step.staging import Array


class AttentionBackend(Protocol):
    """Interface: causal attention of each token over its own sequence, through the page table."""

    static_extends: bool
    """Whether a graph may hold extends. Then extends are padded, and so are the arrays of `plan`: zeros
    follow the step's own, up to the size of `room`."""

    def room(self, bucket: Bucket) -> Plan:
        """Make zeros, as large as the plan of a step in `bucket` can be.

        Zeros mean that a step has no extends, and that no keys are shared. An empty plan for a grouped
        bucket means that so many decodes are never grouped.
        """
        ...

    def plan(self, step: StepRows, bucket: Bucket, captured: bool) -> Plan:
        """Plan a step on the host. Returns named arrays, which are uploaded with the step.

        A step with extends: how they are cut into work. A step of decodes alone: which of them share
        keys; the arrays' shapes follow the bucket, and without groups (`groups.is_grouped`) each
        decode reads all of its own keys. Planning decodes again is cheap while the rows stay the same.
        The step's new page table entries are sent to the device first. `captured`: a graph runs the
        step, and the arrays are as large as `room`.
        """
        ...

    def plan_decodes(self, rows: Array, positions: Array) -> None:
        """Prepare a step of decodes alone. Called before a graph of this size is captured or replayed.

        rows, positions int32[B], padding included.
        """
        ...

    def unlike_decodes(self, most: int) -> list[int]:
        """List numbers of decodes, up to `most`, that together launch every variant of every kernel.

        They are for loading the kernels of steps without a graph. Empty: the captured sizes launch
        them all.
        """
        ...

    def attend(self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec) -> Tensor:
        """Attend: q [T, heads, D] over the keys and values of one layer -> [T, heads * D]."""
        ...
