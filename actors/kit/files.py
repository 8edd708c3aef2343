"""How many files a process may have open, each socket is one; and files that hold secrets.

Systems give a process 1024 at first and let it ask for more. A server without free files accepts no
connection, so a few hundred idle connections of one client would lock all others out.
"""

import os
import resource
import stat
from pathlib import Path

from ramify.actors.kit.log import get_log
from ramify.protocol.errors import ConfigError

OTHERS = 1256  # connections that only ask something by HTTP, libraries, logs

log = get_log(__name__)


def allow_files(sockets: int) -> int:
    """Raise this process' limit so far that `sockets` fit; children inherit it. Returns the limit.

    A limit that the system does not let us raise is logged.
    """
    needed = sockets + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed < needed:
        log.warning(
            "the limit of open files is too low for --max-sockets: raise it with `ulimit -n`",
            open_files=allowed,
            needed=needed,
        )
    return allowed


def read_secret_file(path: Path, most: int, name: str, failure: type[Exception] = ConfigError) -> bytes:
    """Raises `failure`, whose text begins with `name`: unreadable, or more than `most` bytes."""
    try:
        with path.open("rb") as file:
            _judge(path, os.fstat(file.fileno()).st_mode)
            data = file.read(most + 1)
    except OSError as error:
        raise failure(f"{name} {path} cannot be read: {error.strerror or error}") from error
    if len(data) > most:
        raise failure(f"{name} {path} has more than {most} bytes")
    return data


def warn_of_readers(path: Path) -> None:
    """Warn if other users may read a secret file that a library reads for us. Raises OSError."""
    _judge(path, path.stat().st_mode)


def _judge(path: Path, mode: int) -> None:
    """Warn, not refuse: a container's platform mounts secrets as it likes (0444, or 0440 for a group),
    and nobody else is there.
    """
    if stat.S_ISREG(mode) and mode & 0o077:
        shown = f"{stat.S_IMODE(mode):o}"
        log.warning("others may read this secret file: chmod 600 it", path=str(path), mode=shown)
