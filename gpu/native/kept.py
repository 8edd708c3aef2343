"""The cache of compiled machine code between starts of the server, in a folder of the user's own.

Compiling the kernels of a model takes 1 to 2 s of CPU. An entry is a kernel, or a few. Its key is all
that its code depends on: our sources, their arguments, LLVM's version, the CPU and its features. It is
executed, so it is read only from a file and a folder that are the user's and that no other user may
write, and only whole (a digest is in front of the code). It is written beside its place and then
renamed, so no reader sees a part of it; the oldest entries are removed when there are too many. Where
the folder cannot be used nothing is kept.

`RAMIFY_KERNEL_CACHE` names another folder; empty, nothing is kept.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

MOST_FILES = 512  # a model asks for 10 to 30; other versions of the engine, and other CPUs, for others
MOST_BYTES = 1 << 20  # of one file; the largest kernel takes some 50 kB
_DIGEST = hashlib.sha256().digest_size


def folder() -> Path | None:
    """Find the folder where code is kept; None: nothing is to be kept."""
    named = os.environ.get("RAMIFY_KERNEL_CACHE")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "ramify" / "kernels"
    except RuntimeError:  # a user without a home
        return None


class CachedCode:
    """An entry: the code that depends on `depends_on`."""

    def __init__(self, depends_on: Sequence[str], place: Path | None) -> None:
        """`place`: the folder; None: nothing is kept."""
        digest = hashlib.sha256()
        for each in (*depends_on, _sources()):
            digest.update(hashlib.sha256(each.encode()).digest())
        self._place = place
        self._name = digest.hexdigest()

    @property
    def exists(self) -> bool:
        """Whether the entry's file exists, whatever it holds."""
        return self._place is not None and (self._place / self._name).exists()

    def read(self) -> bytes | None:
        """Read the code; None: it is missing, damaged, or another user could have written it."""
        if self._place is None:
            return None
        try:
            if not _own(os.lstat(self._place)):
                return None
            handle = os.open(self._place / self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(handle, "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or not _own(found) or found.st_size > MOST_BYTES:
                    return None
                content = file.read(MOST_BYTES)
            digest, code = content[:_DIGEST], content[_DIGEST:]
            if not code or hashlib.sha256(code).digest() != digest:
                return None
            with contextlib.suppress(OSError):  # a read-only folder
                os.utime(self._place / self._name)  # used: the last ones to go
        except OSError:
            return None
        return code

    def write(self, code: bytes) -> None:
        """Write the code, if the folder can be used."""
        if self._place is None or len(code) + _DIGEST > MOST_BYTES:
            return
        with contextlib.suppress(OSError):
            self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _own(os.lstat(self._place)):
                return
            handle, path = tempfile.mkstemp(prefix=".", dir=self._place)  # readable by the user alone
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(code).digest() + code)
                os.replace(path, self._place / self._name)
            except OSError:
                os.unlink(path)
                raise
            self._bound(self._place)

    @staticmethod
    def _bound(place: Path) -> None:
        """Remove the entries used longest ago; files of writers that died count as entries."""
        aged = sorted(((each.stat().st_mtime, each.path) for each in os.scandir(place)), reverse=True)
        for _, path in aged[MOST_FILES:]:
            os.unlink(path)


def _own(found: os.stat_result) -> bool:
    """Whether a file or folder is this user's, and no other user may write it."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode)


@cache
def _sources() -> str:
    """Compute a digest of the sources of the kernels: this package."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for part in (file.name.encode(), file.read_bytes()):
            digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
