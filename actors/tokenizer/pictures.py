"""Decodes clients' pictures in processes of their own, from a few threads that have nothing else to do.

A process that takes too long is killed, and the picture refused; the next one gets another process.
Parties share the processes: none has all of them, and no fetched pictures either.
This file does not know formats (`picture_program.py`), nor sessions.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ramify.actors.kit.log import configured, get_log
from ramify.actors.links.blocking import BlockingLink
from ramify.actors.links.frames import LinkClosed, LinkError
from ramify.actors.processes.messages import decoder, encoder
from ramify.actors.tokenizer.encoder import Party, may_take
from ramify.actors.tokenizer.fetching import PictureFetcher
from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import (
    FromDecoder,
    Picture,
    PictureDone,
    PictureJob,
    PictureReady,
    PictureRefused,
    PictureSettings,
    is_remote,
)
from ramify.protocol.plan import unpack

PROGRAM = "ramify.actors.tokenizer.picture_program"
PROCESSES = 3  # each is started when it is needed first
START_SECONDS = 30.0
PROCESSOR_SECONDS = 6  # of one picture: the largest that is admitted takes 2.4
SECONDS = 20.0  # the same on a busy machine, where it waits for a processor

log = get_log(__name__)


class _Process:
    """A started process. `ended`: it can take no job."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline, end = os.pipe()
        self._lifeline = os.fdopen(end, "wb", 0)
        self.ended = False
        log = msgspec.json.encode(configured()).decode()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno()), str(lifeline), log],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,  # Ctrl-C reaches the engine only
            )
        os.close(lifeline)
        self._link: BlockingLink[PictureJob, FromDecoder] = BlockingLink(
            ours, decoder(FromDecoder), encoder()
        )

    def ready(self) -> None:
        """Wait until it can take a job. Raises LinkClosed, LinkError, TimeoutError."""
        if not isinstance(self._link.receive(START_SECONDS), PictureReady):
            raise TimeoutError(f"its process was not ready within {START_SECONDS:g} s")

    def work(self, job: PictureJob, seconds: float) -> PictureDone | PictureRefused:
        """Raises LinkClosed and LinkError, and TimeoutError."""
        self._link.send(job)
        answer = self._link.receive(seconds)
        if isinstance(answer, PictureDone | PictureRefused):
            return answer
        raise TimeoutError(f"it takes more than {seconds:g} s")

    @property
    def overran(self) -> bool:
        """Whether it ended, and that was by its bound on the processor's time."""
        return self._process.returncode == -signal.SIGXCPU

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it now. Again: no change."""
        if not self.ended:
            self.ended = True
            self._process.kill()
            self._process.wait()
            self._link.close()
            self._lifeline.close()


class Shown(NamedTuple):
    """A picture, and its tokens with those around it."""

    picture: Picture
    tokens: "array[int]"


def settings_of(decoder: "PictureDecoder | None") -> PictureSettings | None:
    return None if decoder is None else decoder.settings


class PictureDecoder:
    """Its processes, which take a job each."""

    def __init__(
        self,
        settings: PictureSettings,
        seconds: float = SECONDS,
        fetcher: PictureFetcher | None = None,
    ) -> None:
        """`fetcher`: of those that are given by their address."""
        self.settings = settings
        self.fetcher = fetcher
        self._seconds = seconds
        self._changed = threading.Condition()  # guards the three below
        self._idle: list[_Process | None] = [None] * PROCESSES  # None: not started
        self._working: Counter[Party] = Counter()
        self._fetched: set[Party] = set()  # that have a fetched one decoded
        self._started: set[_Process] = set()

    def each(self, images: Sequence[bytes], party: Party = "") -> Iterator[Shown]:
        """Those of an op of `party`, one after the other: blocks; for threads. Raises BadRequest."""
        left = self.fetcher.allowance() if self.fetcher is not None else None
        for number, data in enumerate(images):
            field = f"images[{number}]"
            if is_remote(data):
                if self.fetcher is None or left is None:
                    told = "is an address, and this server fetches none (--fetch-images): send its file"
                    raise BadRequest(f"the picture {told} - at `{field}`", details={"path": field})
                yield self.decode(self.fetcher.fetch(data, field, left), field, party, fetched=True)
            else:
                yield self.decode(data, field, party)

    def decode(self, data: bytes, field: str, party: Party = "", *, fetched: bool = False) -> Shown:
        """Blocks; for threads. Raises BadRequest, which names `field`.

        `fetched`: a party has one of those decoded at a time, and one process is left to sent pictures.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._may(party, fetched))
            process = self._idle.pop()
            self._working[party] += 1
            self._fetched |= {party} if fetched else set()
        answer: PictureDone | PictureRefused = PictureRefused("could not be decoded")
        try:
            if process is not None and not process.alive:  # that is no fault of this picture
                self._started.discard(process)
                process.kill()
                process = None
            if process is None:
                process = _Process()
                self._started.add(process)
                process.ready()
            answer = process.work(PictureJob(data, self.settings, PROCESSOR_SECONDS), self._seconds)
        except (OSError, LinkClosed, LinkError) as error:  # a TimeoutError is an OSError
            why = f"{error or 'its process ended'}"
            if process is not None:
                self._started.discard(process)
                process.kill()
                if process.overran:
                    why = f"it takes more than {PROCESSOR_SECONDS} s of a processor"
                process = None
            log.warning("a picture could not be decoded", reason=why, bytes=len(data))
            answer = PictureRefused(f"cannot be decoded: {why}")
        finally:
            with self._changed:
                self._idle.append(process)
                self._working -= Counter([party])
                self._fetched -= {party} if fetched else set()
                self._changed.notify_all()
        if isinstance(answer, PictureRefused):
            raise BadRequest(f"the picture {answer.why} - at `{field}`", details={"path": field})
        around = self.settings
        return Shown(answer.picture, array("i", [*around.before, *unpack(answer.ids), *around.after]))

    def _may(self, party: Party, fetched: bool) -> bool:
        mine = self._working[party]
        barred = fetched and (party in self._fetched or len(self._fetched) >= PROCESSES - 1)
        return not barred and may_take(mine, self._working.total() - mine, PROCESSES)

    def close(self) -> None:
        """End the processes; what is under way fails."""
        if self.fetcher is not None:
            self.fetcher.close()
        for process in list(self._started):
            process.kill()
