"""Starts the executor where placement wants it.

It knows neither what an executor computes nor how the two placements work.
"""

from typing import Literal

from ramify.actors.executor.handle import ExecutorHandle
from ramify.actors.executor.process_executor import ProcessExecutor
from ramify.actors.executor.spec import ExecutorSpec, ProgressCallback
from ramify.actors.executor.thread_executor import ThreadExecutor
from ramify.actors.kit.mailbox import Address
from ramify.protocol.messages import SchedulerEvent


async def start_executor(
    spec: ExecutorSpec,
    placement: Literal["thread", "process"],
    results: Address[SchedulerEvent] | None = None,
    progress: ProgressCallback = lambda what, done: None,
) -> ExecutorHandle:
    """Start an executor and wait until it is ready. Its results are told to `results`.

    `results` may be given later, with `handle.connect`. `progress` is called on the event loop.
    Cancelled, it leaves nothing
    behind but a thread that is in the middle of loading, which then ends by itself.

    Raises ModelError and ConfigError for what the user can mend, else NotStarted.
    """
    handle: ExecutorHandle
    if placement == "thread":
        handle = await ThreadExecutor.start(spec, progress)
    else:
        handle = await ProcessExecutor.start(spec, progress)
    if results is not None:
        handle.connect(results)
    return handle
