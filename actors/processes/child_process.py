"""A process that the engine starts, with a link to it. What it runs is in `main.py`.

The process is started fresh, not forked, because torch has threads. It inherits one end of an anonymous
socket pair, so nothing is left in the file system, and one end of a pipe, by which it sees that its
parent has ended even if its loop hangs. Its end is seen twice: as its exit and as the end of the link.
The exit says why; the link's end says that all that it had sent has been received.

This file does not know what the process does, nor what the messages mean.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, Generic

import anyio
import msgspec

from ramify.actors.kit.log import configured
from ramify.actors.links.frames import MAX_FRAME, In, Out
from ramify.actors.links.link import Link, open_link

PARTING_SECONDS = 1.0  # between the end of the link and the end of the process


async def spawn(
    module: str, arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Start Python with a module as its program, which inherits `fds`. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # the working directory has no modules
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=fds,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the engine only, which then stops it
    )


class ChildProcess(Generic[Out, In]):
    """A started process. `link`: the way to it. `killed`: whether it had to be."""

    link: Link[Out, In]  # from `start` on

    def __init__(self, process: asyncio.subprocess.Process, lifeline: BinaryIO) -> None:
        self._process = process
        self._lifeline = lifeline
        self._loop = asyncio.get_running_loop()
        self._broken: Exception | None = None  # why the link ended
        self._on_end: Callable[[], None] = lambda: None
        self.killed = False

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        decoder: "msgspec.msgpack.Decoder[In]",
        encoder: msgspec.msgpack.Encoder,
        on_message: Callable[[In], None],
        *,
        arguments: Sequence[str] = (),
        inherit: Sequence[int] = (),
        max_frame: int = MAX_FRAME,
        environment: Mapping[str, str] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> "ChildProcess[Out, In]":
        """Start `module`, which gets `arguments`. It logs as this process does.

        `inherit`: further file descriptors that it gets. `environment`: variables beside those of this
        process. `on_end` is called when the link has ended. Cancelled or failed, nothing is left.
        """
        ours, theirs = socket.socketpair()
        lifeline, end = os.pipe()
        held = os.fdopen(end, "wb", 0)
        log = msgspec.json.encode(configured()).decode()
        process: asyncio.subprocess.Process | None = None
        try:
            with theirs, anyio.CancelScope(shield=True):  # cancelled in the midst it would be nobody's
                process = await spawn(
                    module,
                    (str(theirs.fileno()), str(lifeline), log, *arguments),
                    (theirs.fileno(), lifeline, *inherit),
                    {**os.environ, **(environment or {})},
                )
        except BaseException:
            ours.close()
            held.close()
            raise
        finally:
            os.close(lifeline)
        assert process is not None  # a shielded scope lets errors pass
        self = cls(process, held)
        self._on_end = on_end
        try:
            link: Link[Any, In] = await open_link(
                name,
                ours,
                decoder,
                encoder,
                on_message=on_message,
                on_end=self._link_ended,
                max_frame=max_frame,
            )
            self.link = link
        except BaseException:
            self.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()
            held.close()
            raise
        return self

    @property
    def pid(self) -> int:
        """The process' id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    def kill(self) -> None:
        """End the process now."""
        if self._process.returncode is None:
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                # not `Process.kill`: it may take the exit code, so that asyncio finds none and says 255
                os.kill(self._process.pid, signal.SIGKILL)

    async def ended(self, dismiss: Callable[[], None] | None = None) -> int:
        """Wait until the process has ended and all that it sent has been received: its exit code.

        Cancelled, it kills the process: neither process nor socket stays. `dismiss` asks the process to
        end by itself; then it is killed if it has not ended PARTING_SECONDS later.
        """
        try:
            code = await self._process.wait()
            with anyio.move_on_after(PARTING_SECONDS):
                await self.link.wait_closed()
        finally:
            if dismiss is not None and self._process.returncode is None:
                dismiss()
                with anyio.move_on_after(PARTING_SECONDS, shield=True):
                    await self._process.wait()
            self.kill()
            with anyio.CancelScope(shield=True):
                await self._process.wait()
                self.link.abort()  # a grandchild may hold the other end open
                await self.link.wait_closed()
                self._lifeline.close()
        return code

    def explain(self, code: int) -> str:
        """How it ended, in words."""
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process {self.pid} was killed by {signal.Signals(-code).name}"
        broken = f" ({self._broken})" if self._broken is not None else ""
        return f"its process {self.pid} ended with exit code {code}{broken}; see its log"

    def _link_ended(self, error: Exception | None) -> None:
        self._broken = error
        self._on_end()
        self._loop.call_later(PARTING_SECONDS, self.kill)
