"""A replica, as its front sees it: its link, what waits for it, how it was when it last said something.

It does not know how the replica was started, nor which sessions are there.
"""

from collections.abc import Callable
from typing import Any, Literal

from ramify.actors.cluster.replica_messages import (
    ForCore,
    FromFront,
    Report,
    StartReplica,
    ToCore,
    ToFront,
)
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.links.bundle import MOST, Bundle, CannotEncode
from ramify.actors.links.link import Link
from ramify.actors.processes.messages import encoder
from ramify.actors.processes.silence import Silence
from ramify.protocol.plan import ExecutorInfo

SESSIONS = MOST // 4  # messages that wait for it, where what clients cause has to wait

State = Literal["starting", "ready", "stalled", "draining", "gone"]
log = get_log("ramify.actors.cluster")


class ReplicaMember:
    """`kills`: ends its process, where that is ours. `silence`: its owner keeps it."""

    def __init__(self, number: int, kills: Callable[[], None] = lambda: None) -> None:
        self.number = number
        self.state: State = "starting"
        self.info: ExecutorInfo | None = None
        self.report = Report()
        self.fault_since: float | None = None  # since when it reports a fault
        self.pid = 0
        self.host = ""
        self.silence = Silence(0.0)
        self.why = ""  # it was ended, where it was
        self.leaves = False  # it was told to
        self.until: float | None = None  # then: to when it serves on, or generations may run
        self.drained = False  # it leaves in order
        self.asked = True  # for all that its cache has
        self.kills = kills
        self._link: Link[FromFront, ToFront] | None = None  # until its process runs
        self._core: Bundle[ForCore] | None = None

    def attach(self, link: Link[Any, ToFront], begin: StartReplica) -> None:
        """It has a link."""
        self._link = link
        self._core = Bundle(link, ToCore, encoder())
        self.tell(begin)

    def tell(self, message: FromFront) -> None:
        """Send it, unless the replica takes nothing: then it has hung."""
        if self._link is None:
            return
        try:
            self._link.tell(message)
        except MailboxFull as error:
            self.hung(str(error))
        except MailboxClosed:
            pass  # its end is under way

    def send(self, message: ForCore) -> None:
        """What clients cause. Raises MailboxFull, and then nothing has happened. Raises CannotEncode."""
        assert self._core is not None, "it is ready"
        if len(self._core) >= SESSIONS:
            raise MailboxFull(f"{SESSIONS} messages wait for replica {self.number}")
        self._core.tell(message)

    def must(self, message: ForCore) -> None:
        """What has to arrive, if the replica lives."""
        if self._core is None:
            return
        try:
            self._core.tell(message)
        except MailboxFull as error:
            self.hung(str(error))
        except CannotEncode:
            log.exception("a message is lost", replica=self.number)

    def hears(self, report: Report, now: float) -> None:
        """How it is."""
        if report.fault is None:
            if self.fault_since is not None:
                log.info("a replica makes progress again", replica=self.number)
            self.fault_since = None
        elif self.fault_since is None:
            self.fault_since = now
            log.warning("a replica makes no progress", replica=self.number, fault=report.fault)
        self.report = report

    def consumed(self) -> None:
        """A message of it has been dealt with."""
        if self._link is not None and not self._link.closed:
            self._link.consumed()

    def hung(self, why: str) -> None:
        """It does not read or does not speak: end it."""
        if not self.why:
            self.why = f"it hung: {why}"
        self.kill()

    def kill(self) -> None:
        """End its process, or at least the link."""
        if self._link is not None:
            self._link.abort()
        self.kills()

    def part(self) -> None:
        """The front stops. The replica may wait for the next one."""
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """Forget what waits."""
        if self._core is not None:
            self._core.close()
