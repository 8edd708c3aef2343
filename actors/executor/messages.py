"""What an executor's process and its starter tell each other.

starter                     process
Start(spec)       ------->
                  <-------  Loading ... Loading
                  <-------  ExecutorInfo, or StartFailed and the end
                  <-------  Waiting, every second without a plan
StepPlan          ------->
                  <-------  StepResult, or ExecutorDown and the end
StopExecutor      ------->  finishes what it has, ends with exit code 0
"""

from ramify.actors.executor.spec import ExecutorSpec
from ramify.actors.processes.messages import Loading, Message, StartFailed
from ramify.protocol.plan import ExecutorDown, ExecutorInfo, StepPlan, StepResult, StopExecutor


class Start(Message, frozen=True):
    """Make this executor."""

    spec: ExecutorSpec


class Waiting(Message, frozen=True):
    """A sign of life of a process that has nothing to do."""


ToExecutor = Start | StepPlan | StopExecutor
FromExecutor = Waiting | Loading | StartFailed | ExecutorInfo | StepResult | ExecutorDown
