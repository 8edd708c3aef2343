"""The executor's loop: plans in, results out, at most two steps on the device.

Synchronous. It runs in the executor's thread or in the main thread of its process, and does not
know which: an inbox gives it messages, `send` takes its results.

What runs on a GPU is launched, not awaited. The loop therefore launches plan N+1 while step N is
on the device, and reports N the moment it is done. On a CPU a launched step is ready at once, so
the same loop runs one step after the other.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from ramify.actors.kit.log import get_log
from ramify.gpu.executors.base import BadLogits, Executor, PendingStep
from ramify.protocol.messages import ExecutorMessage
from ramify.protocol.plan import PicturesSeen, StepResult, StopExecutor

IN_FLIGHT = 2
POLL_SECONDS = 100e-6  # how late the end of a lone step may be seen; see `_wait`
SEEN_SECONDS = 1e-3  # how late it may be told that pictures are seen, while no step runs

log = get_log(__name__)


class Inbox(Protocol):
    """Where the loop takes its messages from."""

    def take(self, timeout: float | None) -> ExecutorMessage | None:
        """The next message; None after `timeout` seconds (None: wait for ever, 0: do not wait)."""


def run(executor: Executor, inbox: Inbox, send: Callable[[StepResult | PicturesSeen], None]) -> None:
    """Run plans until StopExecutor, whose predecessors are all finished and reported first.

    What the executor, `inbox.take` or `send` raises ends the loop and is the caller's to handle:
    after an error nothing that the executor holds can be trusted.
    """
    pending: deque[PendingStep] = deque()  # launched, in order
    tower = executor.tower
    while True:
        while pending and pending[0].ready():
            send(_result(pending.popleft()))
        if tower is not None and tower.busy and (seen := tower.seen()) is not None:
            send(seen)
        if len(pending) == IN_FLIGHT:
            send(_result(pending.popleft()))
            continue
        if pending:
            message = _wait(pending[0], inbox)
        else:
            message = inbox.take(None if tower is None or not tower.busy else SEEN_SECONDS)
        match message:
            case None:
                continue
            case StopExecutor():
                break
            case plan:
                pending.append(executor.launch(plan))
    for step in pending:
        send(_result(step))


def _result(step: PendingStep) -> StepResult:
    """The step's result. Rows with bad logits have token -1 in it; the others are unharmed."""
    try:
        return step.result()
    except BadLogits as error:
        log.error(str(error))
        return error.result


def _wait(oldest: PendingStep, inbox: Inbox) -> ExecutorMessage | None:
    """Wait for whichever comes first: the end of `oldest` (None) or a message.

    A device cannot wake a thread that waits for a message, so this looks at the step every 100 us.
    It happens only with one step in flight; with two, the loop blocks on the device.
    """
    message = inbox.take(0)
    while message is None and not oldest.ready():
        message = inbox.take(POLL_SECONDS)
    return message
