"""Which session a process is working on, in memory that its engine can read.

A process whose loop is stuck answers nothing, and when it is killed nobody knows why. So it writes the
public id of a session before it does anything for it, and erases it afterwards: what is there when it
is killed was its last work. One piece of an anonymous file for each process, inherited.
"""

import mmap
import os

CELL = 256  # bytes of a process: the id, filled up with zeros


def working_file(processes: int) -> int:
    """A new file for so many processes: its descriptor."""
    file = os.memfd_create("ramify-working")
    os.truncate(file, CELL * processes)
    return file


class Working:
    """The piece of process `number`, in the file `fd`."""

    def __init__(self, fd: int, number: int) -> None:
        self._memory = mmap.mmap(fd, 0)
        self._begin = CELL * number

    def on(self, session: bytes) -> None:
        """From now on it works on this session: `cell_of` its id."""
        self._memory[self._begin : self._begin + CELL] = session

    def off(self) -> None:
        """It works on none."""
        self._memory[self._begin] = 0

    @property
    def session(self) -> str | None:
        """Which it works on."""
        cell = self._memory[self._begin : self._begin + CELL]
        return cell.rstrip(b"\0").decode() if cell[0] else None


def cell_of(session: str) -> bytes:
    """What `Working.on` writes."""
    return session.encode()[:CELL].ljust(CELL, b"\0")
