"""What an executor's process and its starter tell each other.

starter                      process
StartExecutor(spec) ------>
                    <------  Loading ... Loading
                    <------  ExecutorInfo, or StartFailed and the end
                    <------  SignOfLife, every second without a plan
StepPlan            ------>
                    <------  StepResult, or ExecutorDown and the end
                    <------  PicturesSeen, at any time after a plan with pictures to look at
StopExecutor        ------>  finishes what it has, ends with exit code 0

Of several ranks only rank 0 gets plans and StopExecutor, and sends results: it tells the others.
"""

from ramify.actors.executor.spec import ExecutorSpec
from ramify.actors.processes.messages import Loading, ProcessMessage, StartFailed
from ramify.gpu.ranks.ring import RankPlace
from ramify.protocol.plan import (
    ExecutorDown,
    ExecutorInfo,
    PicturesSeen,
    StepPlan,
    StepResult,
    StopExecutor,
)


class StartExecutor(ProcessMessage, frozen=True):
    """Make this executor. `place`: of one of several ranks."""

    spec: ExecutorSpec
    place: RankPlace | None = None


class SignOfLife(ProcessMessage, frozen=True):
    """A sign of life of a process that has nothing to do."""


ToExecutor = StartExecutor | StepPlan | StopExecutor
FromExecutor = (
    SignOfLife | Loading | StartFailed | ExecutorInfo | StepResult | PicturesSeen | ExecutorDown
)
