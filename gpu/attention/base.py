"""What every attention back end offers: to the executors a plan on the host, to the layers `attend`.

The keys and values of a step's new tokens are stored before `attend` is called. A back end for CUDA
never waits for the device, and what it does for decodes must be fit for a CUDA graph.
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
    """Causal attention of each token over its own sequence, through the page table."""

    static_extends: bool
    """Extends may be padded with tokens that no run has, and captured in a graph: then the arrays of
    `plan` are as long as `room` says, with zeros behind the step's own."""

    def room(self, bucket: Bucket) -> Plan:
        """Zeros as large as the plan of a step in `bucket` can be; they say that nothing is shared.

        Empty for a grouped bucket: decodes of that number are never grouped. A bucket with extends
        is asked for only if `static_extends`.
        """
        ...

    def plan(self, step: StepRows, bucket: Bucket, captured: bool) -> Plan:
        """The host's part, once a step: arrays that are uploaded with it, by name.

        For extends: how they are cut. For decodes alone, which of them share keys: all steps of one
        number of lines get arrays of the same shapes; empty where each reads all of its keys itself.
        That costs next to nothing while the rows stay the same. What the step adds to the page
        table is on its way to the device already. `captured`: a graph runs the step, which was
        captured with arrays as of `room`.
        """
        ...

    def plan_decodes(self, rows: Array, positions: Array) -> None:
        """The host's part of a step of decodes alone, before a graph of this size runs or is made.

        rows, positions int32[B], padding included.
        """
        ...

    def unlike_decodes(self, most: int) -> list[int]:
        """Numbers of decodes, up to `most`, that together launch each kernel that any number launches
        beside extends or alone. Empty: those of captured sizes launch them all.
        """
        ...

    def attend(self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec) -> Tensor:
        """q [T, heads, D] over the keys and values of one layer -> [T, heads * D]."""
        ...
