"""The vocabulary of a model as the executor gets it, once, ahead of the first constraint.

Reading a large tokenizer takes seconds, in calls that hold the interpreter's lock. A process that ends
with that holds up nobody: `python -m ramify.actors.grammar.vocabulary FOLDER` writes the body to its
standard output. It takes 260 MB meanwhile, and a second more, as it imports what the engine has.
"""

import os
import sys
from pathlib import Path
from subprocess import DEVNULL

import anyio
import msgspec
from anyio.abc import Process

from ramify.actors.kit.log import get_log
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.constraints import VocabularyBody
from ramify.protocol.errors import ModelError

READ_SECONDS = 120.0  # it takes a few; who hangs would keep all constraints waiting
log = get_log(__name__)


class Unread(Exception):
    """The vocabulary could not be read; the process has said why on standard error."""


async def read_elsewhere(folder: Path) -> bytes:
    """`vocabulary_of` in a process of its own, which goes when this is cancelled. Raises Unread."""
    try:
        with anyio.fail_after(READ_SECONDS):
            return await _read_elsewhere(folder)
    except TimeoutError:
        raise Unread(f"the vocabulary could not be read within {READ_SECONDS:g} s") from None


async def _read_elsewhere(folder: Path) -> bytes:
    # `-P`: the working directory is no place to import from. A session: Ctrl-C reaches the engine only.
    command = (sys.executable, "-P", "-m", "ramify.actors.grammar.vocabulary", str(folder))
    process: Process | None = None
    with anyio.CancelScope(shield=True):  # cancelled in the midst it would be nobody's
        process = await anyio.open_process(command, stdin=DEVNULL, stderr=None, start_new_session=True)
    assert process is not None  # a shielded scope lets errors pass
    async with process:
        assert process.stdout is not None
        body = b"".join([part async for part in process.stdout])
        code = await process.wait()
    if code:
        raise Unread(f"the vocabulary could not be read: exit code {code}, see the log")
    return body


class ReadAhead:
    """The result of `read_elsewhere`, begun by `run` in advance, as while a model loads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._body: bytes | None = None
        self._ended = anyio.Event()

    async def run(self) -> None:
        """Read; `body` has it from then on. What fails is logged, and tried again by `body`."""
        try:
            self._body = await read_elsewhere(self._folder)
        except Exception:
            log.exception("the vocabulary was not read ahead: who needs it tries again")
        finally:
            self._ended.set()

    async def body(self) -> bytes:
        """The body of constraint 0, behind `run`. Raises Unread, OSError."""
        await self._ended.wait()
        if self._body is None:
            return await read_elsewhere(self._folder)
        body, self._body = self._body, None  # megabytes, asked for once
        return body


async def read_here(folder: Path) -> bytes:
    """`vocabulary_of` in a thread."""
    return await anyio.to_thread.run_sync(vocabulary_of, folder)


def vocabulary_of(folder: Path) -> bytes:
    """The body of constraint 0, read from the model's folder."""
    return packed(Tokenizer.load(folder))


def packed(tokenizer: Tokenizer) -> bytes:
    """The vocabulary's body for a tokenizer that was read already."""
    return msgspec.msgpack.encode(VocabularyBody(*tokenizer.words))


def main(folder: Path) -> None:
    """Write the body to standard output, to which nothing else is written."""
    os.nice(10)  # whoever serves goes first
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print
    try:
        body = vocabulary_of(folder)
    except ModelError as error:
        sys.exit(error.message)
    with open(output, "wb") as file:
        file.write(body)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
