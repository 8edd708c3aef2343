"""A fake executor whose steps last as long as those of `routing_sim.py`: it sleeps.

So several replicas fit on few cores, and what they are asked for is real.
"""

from typing import Any

from routing_sim import step_seconds

from ramify.gpu.executors.fake import FakeExecutor, FakeModel
from ramify.gpu.step.rows import StepRows


class TimedExecutor(FakeExecutor):
    """`model`: keywords of FakeModel; `settings`: of FakeExecutor. `stretch`: times as long."""

    def __init__(self, *, model: dict[str, int], stretch: float, **settings: Any) -> None:
        super().__init__(FakeModel(**model), **settings)
        self._stretch = stretch

    def seconds(self, step: StepRows) -> float:
        extends = step.extends
        prompt = int(step.counts[:extends].sum())
        context = int((step.starts + step.counts)[extends:].sum())
        return self._stretch * step_seconds(prompt, len(step.rows) - extends, context)
