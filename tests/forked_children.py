"""The processes of an engine in a test's process are forked from one that has imported what they run.

A fresh Python takes half a second of CPU to import a gateway or an executor: most of what many tests
take. What the processes do is the same. Those of a server (`ramify serve` in a test) are started fresh.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    import pytest

REPLICA = "ramify.actors.cluster.replica"
MODULES = (
    "ramify.actors.gateway_program",
    "ramify.actors.executor.executor_program",
    "ramify.actors.grammar.compile_program",
    REPLICA,
)
# what they import when they have begun, each at every start otherwise
LATER = "numpy.ma", "ramify.gpu.executors.fake"
MOST_BYTES = 1 << 18  # of a request: arguments and the environment
MOST_FDS = 64
HIGH = 512  # descriptors wait above it until their places are free
PR_SET_CHILD_SUBREAPER = 36
FRESH = "RAMIFY_TEST_FRESH"  # a variable of tests about how a fresh process begins


class Source:
    """The process that others are forked from, at the other end of a link."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.path = os.environ.get("PYTHONPATH", "")

    def start(
        self, module: str, arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]
    ) -> "Forked":
        """Run `module` with descriptors at the same numbers as here."""
        request = json.dumps([module, list(arguments), list(fds), dict(environment), os.getcwd()])
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # its parent ends at once: it becomes a child of this process
        try:
            socket.send_fds(self._link, [request.encode()], [1, 2, *fds])
            pid = int(self._link.recv(32))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)
        return Forked(pid)


class Forked:
    """What `ChildProcess` needs of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._status.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    @property
    def returncode(self) -> int | None:
        return self._status.result() if self._status.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._status)


@contextmanager
def forked_children(patch: "pytest.MonkeyPatch") -> Iterator[None]:
    """Processes of `MODULES` are forked meanwhile."""
    link, theirs = _pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    try:
        assert link.recv(32) == b"ready"
        _fork_from(Source(link), patch.setattr)
        yield
    finally:
        link.close()
        process.wait(60)


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _fork_from(source: Source, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have this process fork its children from `source`."""
    from ramify.actors.processes import child_process

    fresh = child_process.spawn

    async def spawn(
        module: str, arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]
    ) -> Any:
        # a test's own modules may stand before all others
        known = environment.get("PYTHONPATH", "").endswith(source.path)
        if module not in MODULES or not known or FRESH in environment:
            return await fresh(module, arguments, fds, environment)
        return source.start(module, arguments, fds, environment)

    patch(child_process, "spawn", spawn)


# --- in the process that is forked from -----------------------------------------------------------


def _next(control: socket.socket) -> tuple[Any, list[int]]:
    """Fork for each request. Returns in the forked processes only: the request, and its descriptors."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_FDS)
        if not data:
            os._exit(0)
        reading, writing = os.pipe()
        parent = os.fork()
        if not parent:
            if pid := os.fork():
                os.write(writing, str(pid).encode())
                os._exit(0)
            control.close()
            os.close(reading)
            os.close(writing)
            return json.loads(data), fds
        os.close(writing)
        os.waitpid(parent, 0)
        control.send(os.read(reading, 32))
        for fd in (reading, *fds):
            os.close(fd)


def _be(request: Any, fds: list[int]) -> None:
    """Be as a process that was started fresh."""
    module, arguments, places, environment, folder = request
    if module == REPLICA:  # it has children, too
        _fork_from(Source(_twin(fds)))
    os.setsid()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in fds]
    for fd in fds:
        os.close(fd)
    for place, fd in zip((1, 2, *places), high, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder)
    before = len(os.environ.get("PYTHONPATH", ""))
    os.environ.clear()
    os.environ.update(environment)
    path = environment.get("PYTHONPATH", "")
    sys.path[:0] = filter(None, path[: len(path) - before].split(os.pathsep))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _twin(fds: list[int]) -> socket.socket:
    """The link to a fork of this process, from which others are forked as long as the link is held."""
    link, theirs = _pair()
    if os.fork():
        theirs.close()
        high = socket.socket(fileno=fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, HIGH))
        link.close()
        return high
    link.close()
    for fd in fds:
        os.close(fd)
    _be(*_next(theirs))
    os._exit(0)


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    for module in (*MODULES, *LATER):
        importlib.import_module(module)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    checked = importlib.import_module("tests.actors.cache.integrity").checked_when_idle()
    del sys.path[0]
    checked.__enter__()  # in all that are forked
    anyio.run(anyio.sleep, 0)  # imports what drives its loops
    for module in MODULES:
        del sys.modules[module]
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    _be(*_next(control))


if __name__ == "__main__":
    _main()
