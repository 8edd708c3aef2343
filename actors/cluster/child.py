"""The main program of a replica on the front's machine: `python -m ...cluster.child FD LIFELINE`.

FD is a connected Unix stream socket, inherited from the front; LIFELINE the reading end of a pipe whose
other end only the front holds. At SIGTERM it drains: the front takes its sessions elsewhere, then lets
it go. Signals of a terminal are the front's.

Exit codes: 0 left as told, 1 an actor failed, 2 it did not start, 3 the front has gone.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from functools import partial

import anyio

from ramify.actors.cluster.replica import Replica
from ramify.actors.kit.clock import MonotonicClock
from ramify.actors.kit.collector import Collector
from ramify.actors.kit.log import get_log
from ramify.actors.links.link import open_link
from ramify.actors.processes.lifeline import watch
from ramify.protocol.errors import RamifyError

log = get_log("ramify.actors.cluster.child")


async def _run(fd: int) -> int:
    replica = Replica()
    Collector(MonotonicClock()).begin()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, replica.drain)
    code = 2
    try:
        async with anyio.create_task_group() as group:
            sock = socket.socket(fileno=fd)
            code = 0 if await replica.serve(group, partial(open_link, "front", sock)) else 3
            group.cancel_scope.cancel()
    except* RamifyError:
        pass  # the front knows why
    finally:
        with anyio.CancelScope(shield=True):
            await replica.close()
    return code


def main(fd: int, lifeline: int) -> int:
    """Run a replica. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    watch(lifeline)
    try:
        return asyncio.run(_run(fd))
    except Exception:
        log.exception("a replica failed")
        return 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
