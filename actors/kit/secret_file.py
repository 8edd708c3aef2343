"""Files that hold secrets: read within a bound, and with a word where others may read them.

A warning and no refusal: a container's platform mounts secrets as it likes (0444, or 0440 for a group),
and nobody else is there.
"""

import os
import stat
from pathlib import Path

from ramify.actors.kit.log import get_log

log = get_log(__name__)


def read_secret_file(path: Path, most: int) -> bytes:
    """Its bytes; a byte more than `most` where there are more. Raises OSError."""
    with path.open("rb") as file:
        _judge(path, os.fstat(file.fileno()).st_mode)
        return file.read(most + 1)


def warn_of_readers(path: Path) -> None:
    """Warn if other users may read a secret file that a library reads for us. Raises OSError."""
    _judge(path, path.stat().st_mode)


def _judge(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode) and mode & 0o077:
        shown = f"{stat.S_IMODE(mode):o}"
        log.warning("others may read this secret file: chmod 600 it", path=str(path), mode=shown)
