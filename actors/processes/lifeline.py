"""Ends a child process whose loop hangs when its parent is gone.

The parent holds the other end of a pipe, and never writes: its end is the end of file here. A process
whose loop runs has noticed by its link, and has ended by then.
"""

import os
import threading
import time

HUNG_SECONDS = 5.0  # after the parent's end a process that is still there has hung
EXIT_CODE = 3


def watch(lifeline: int) -> None:
    """Watch the reading end of the pipe, in a thread. Processes that are started do not inherit it."""
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_watch, args=(lifeline,), name="lifeline", daemon=True).start()


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)
    time.sleep(HUNG_SECONDS)
    os._exit(EXIT_CODE)
