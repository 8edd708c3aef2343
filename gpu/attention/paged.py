"""What an attention back end offers to the fused decoder, whose state lives on the device.

The keys and values of a step's new tokens are in the pool before `attend` is called. A back end
never waits for the device; its decode part must be fit for a CUDA graph. The interface of the
torch executor is in `base`.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ramify.gpu.rows import Ints, StepRows
from ramify.gpu.staging import Array


@dataclass(slots=True)
class Inputs:
    """T tokens: those of the extends first, then one of each decode.

    `codes` int32[T]: a token, or -(row + 1) for the row's last sampled one. `plan`: the arrays of
    `PagedAttention.plan` on the device, empty for a step without extends. `sampling` int32[S]:
    tokens whose logits are wanted; None: all. `groups`: the arrays of `PagedAttention.groups` on the
    device, for the decodes; empty: each reads all of its keys itself.
    """

    codes: Tensor
    rows: Tensor  # int32[T]
    positions: Tensor  # int32[T]
    extended: int  # tokens of the extends
    plan: list[Tensor]
    sampling: Tensor | None = None
    groups: list[Tensor] = field(default_factory=list)


class PagedAttention(Protocol):
    """Causal attention of each token over its own sequence, through the page table."""

    static_extends: bool
    """Extends may be padded with tokens that no run has, and captured in a graph: then the arrays of
    `plan` are as long as `room` says, with zeros behind the step's own."""

    def room(self, tokens: int, runs: int) -> list[Array]:
        """As large as `plan` can be for so many tokens in so many runs. Only if `static_extends`."""
        ...

    def plan(self, step: StepRows, captured: bool) -> list[Array]:
        """The host's part, once for a step with extends: arrays that are uploaded with the step.

        What the step adds to the page table is on its way to the device already. `captured`: a graph
        runs the step, which was captured with arrays as of `room`.
        """
        ...

    def plan_decodes(self, rows: Array, positions: Array) -> None:
        """The host's part of a step of decodes alone, before a graph of this size runs or is made.

        rows, positions int32[B], padding included.
        """
        ...

    def groups(self, rows: Ints, positions: Ints, size: int) -> list[Array]:
        """The host's part for decodes at `positions` of `rows`, padded to `size` lines.

        Which of them share keys; empty where reading those only once would not pay. All steps of
        one size get arrays of the same shapes. Costs next to nothing while the rows stay the same.
        """
        ...

    def no_groups(self, size: int) -> list[Array]:
        """Arrays of the same shapes that say that no line shares anything; empty: never grouped."""
        ...

    def unlike_decodes(self, most: int) -> list[int]:
        """Numbers of decodes, up to `most`, that together launch each kernel that any number launches
        beside extends or alone. Empty: those of captured sizes launch them all.
        """
        ...

    def attend(
        self, q: Tensor, pool: "tuple[Tensor, Tensor]", inputs: Inputs, window: int | None
    ) -> Tensor:
        """q [T, heads, D] over one layer's pool (k and v, each [slots, kv_heads, D]).

        `window`: how many positions back a token sees, itself included; None: all.
        Returns [T, heads * D].
        """
        ...
