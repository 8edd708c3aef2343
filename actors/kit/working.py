"""The session that a process is working on, in memory that its engine can read.

A process with a stuck loop answers nothing, and when it is killed the cause is gone. So it writes the
public id of a session before it works for it, and erases it afterwards: an id that is there when it is
killed was its last work. Each process inherits one piece of an anonymous file.
"""

import mmap
import os

CELL = 256  # bytes of a process: the id, filled up with zeros


def working_file(processes: int) -> int:
    """The descriptor of a new file for `processes` processes."""
    file = os.memfd_create("ramify-working")
    os.truncate(file, CELL * processes)
    return file


class Working:
    """The piece of process `number`, in the file `fd`."""

    def __init__(self, fd: int, number: int) -> None:
        self._memory = mmap.mmap(fd, 0)
        self._begin = CELL * number

    def on(self, session: bytes) -> None:
        """Set the session (`cell_of` its id) that the process works on."""
        self._memory[self._begin : self._begin + CELL] = session

    def off(self) -> None:
        """Set that the process works on no session."""
        self._memory[self._begin] = 0

    @property
    def session(self) -> str | None:
        """The id of the session that the process works on, or None."""
        cell = self._memory[self._begin : self._begin + CELL]
        return cell.rstrip(b"\0").decode() if cell[0] else None


def cell_of(session: str) -> bytes:
    """The bytes that `Working.on` writes."""
    return session.encode()[:CELL].ljust(CELL, b"\0")
