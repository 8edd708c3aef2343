"""A back end for each shape, where layers differ in heads, head sizes or pages.

Their plans are merged into one. The arrays of the first back end keep their names, and so do slots of
window pages; all others get a number.
"""

from dataclasses import replace

from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.attention.spec import WINDOW_SLOTS, AttentionShape, AttentionSpec
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import Plan, StepInputs
from ramify.gpu.step.rows import StepRows
from ramify.gpu.step.staging import Array


class AttentionByShape:
    """A back end of several. `parts`: one for each shape; decodes share keys in the first one alone."""

    def __init__(self, parts: list[tuple[AttentionShape, AttentionBackend]]) -> None:
        self._parts = [part for _, part in parts]
        self._numbers = {
            (shape.heads, shape.kv_heads, shape.head_dim, shape.windowed): number
            for number, (shape, _) in enumerate(parts)
        }
        self._step: StepInputs[Tensor] | None = None  # whose plan is divided in `_steps`
        self._steps: list[StepInputs[Tensor]] = []
        self.static_extends = all(part.static_extends for part in self._parts)

    def room(self, bucket: Bucket) -> Plan:
        first = self._parts[0].room(bucket)
        if bucket.grouped and not first:
            return {}
        alone = replace(bucket, grouped=False)
        return _together([first, *(part.room(alone) for part in self._parts[1:])])

    def plan(self, step: StepRows, bucket: Bucket, captured: bool) -> Plan:
        return _together([part.plan(step, bucket, captured) for part in self._parts])

    def plan_decodes(self, rows: Array, positions: Array) -> None:
        for part in self._parts:
            part.plan_decodes(rows, positions)

    def unlike_decodes(self, most: int) -> list[int]:
        return sorted({count for part in self._parts for count in part.unlike_decodes(most)})

    def attend(self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec) -> Tensor:
        if step is not self._step:
            self._step, self._steps = (
                step,
                [_part_of(step, number) for number in range(len(self._parts))],
            )
        number = self._numbers[q.shape[1], kv.k.shape[1], q.shape[2], kv.windowed]
        return self._parts[number].attend(q, kv, self._steps[number], spec)


def _part_of(step: StepInputs[Tensor], number: int) -> StepInputs[Tensor]:
    """Return the step with the plan of the part of that number."""
    if not number:
        return step
    ending = f"/{number}"
    plan = step.plan.items()
    return replace(
        step, plan={name.removesuffix(ending): x for name, x in plan if name.endswith(ending)}
    )


def _together(plans: list[Plan]) -> Plan:
    others = {
        name if name == WINDOW_SLOTS else f"{name}/{number}": array
        for number, plan in enumerate(plans[1:], 1)
        for name, array in plan.items()
    }
    return plans[0] | others
