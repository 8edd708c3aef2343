"""The replicas of a front: a table of states and of what changes them, and who leaves when.

    starting --up--> ready --stalls--> stalled        from each state --ends--> gone
                     ready <--goes on-- stalled
                     ready, stalled --drains--> draining

A replica that drains gets no new sessions, and its sessions move as soon as nothing runs in them. The
last one that is ready serves until another one is, where one is to come. One whose executor makes no
progress has stalled: its sessions leave it, and it gets none until it goes on.

This file does not know processes, or how replicas are started. Times are seconds, and arguments.
"""

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Literal

from ramify.actors.cluster.bindings import Bindings
from ramify.actors.cluster.replica_messages import Hello, StartReplica
from ramify.actors.front.core_messages import ForCore, ToCore
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxFull
from ramify.actors.kit.report import Report
from ramify.actors.links.bundle import MOST, Bundle, CannotEncode
from ramify.actors.links.link import Link
from ramify.actors.processes.peer import Peer
from ramify.actors.routing.session_router import SessionRouter
from ramify.protocol.plan import ExecutorInfo

SESSIONS = MOST // 4  # messages that wait for a replica, where what clients cause has to wait

State = Literal["starting", "ready", "stalled", "draining", "gone"]
Event = Literal["up", "stalls", "goes on", "drains", "ends"]
TRANSITIONS: dict[State, dict[Event, State]] = {
    "starting": {"up": "ready", "ends": "gone"},
    "ready": {"stalls": "stalled", "drains": "draining", "ends": "gone"},
    "stalled": {"goes on": "ready", "drains": "draining", "ends": "gone"},
    "draining": {"ends": "gone"},
    "gone": {},
}
HURRY_SECONDS = 5.0  # between two looks at sessions that should have left

log = get_log("ramify.actors.cluster")


class ReplicaMember(Peer):
    """A replica, as its front sees it."""

    def __init__(self, number: int, ends: Callable[[], None] = lambda: None) -> None:
        super().__init__(ends)
        self.number = number
        self.state: State = "starting"
        self.info: ExecutorInfo | None = None
        self.report = Report()
        self.fault_since: float | None = None  # since when it reports a fault
        self.pid = 0
        self.host = ""
        self.leaves = False  # it was told to
        self.until: float | None = None  # then: to when it serves on, or generations may run
        self.drained = False  # it leaves in order
        self.told: float | None = None  # when gateway processes were told so
        self.asked = True  # for all that its cache has
        self._core: Bundle[ForCore] | None = None  # until its process runs

    def begin(self, link: Link[Any, Any], begin: StartReplica | Hello) -> None:
        """It has a link."""
        self.attach(link)
        self._core = self.bundle(ToCore)
        self.tell(begin)

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


class Membership:
    """The members by number. `move(sessions, quietly)` has sessions leave their replica.

    `succeed(member)`: until when the last one may wait for another one, which may have to be started
    (`math.inf`: until it is there); None: none is to come. `drain_s`: how long generations may go on.
    """

    def __init__(
        self,
        bindings: Bindings,
        routing: SessionRouter,
        move: Callable[[list[int], bool], None],
        succeed: Callable[[ReplicaMember, float], float | None],
        drain_s: float,
    ) -> None:
        self._bindings = bindings
        self._routing = routing
        self._move = move
        self._succeed = succeed
        self._drain_s = drain_s
        self._members: dict[int, ReplicaMember] = {}

    def __iter__(self) -> Iterator[ReplicaMember]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, number: int) -> bool:
        return number in self._members

    def get(self, number: int) -> ReplicaMember | None:
        """The member of this number, if there is one."""
        return self._members.get(number)

    def those(self, *states: State) -> list[ReplicaMember]:
        """The members in one of these states."""
        return [member for member in self._members.values() if member.state in states]

    def free(self) -> Iterator[int]:
        """Numbers that no member has, the lowest first."""
        return (number for number in count() if number not in self._members)

    @property
    def fault(self) -> str | None:
        """Why none of them serves, or None: one is ready, and makes progress."""
        ready = self.those("ready")
        faults = [member.report.fault for member in ready if member.report.fault is not None]
        if not ready:
            return "no replica is ready"
        return faults[0] if len(faults) == len(ready) else None

    # --- transitions -----------------------------------------------------------------------------

    def become(self, member: ReplicaMember, event: Event) -> None:
        """The table's only reader. Raises KeyError for what cannot happen in its state."""
        member.state = TRANSITIONS[member.state][event]

    def add(self, member: ReplicaMember) -> None:
        """It is being started, or has come. It takes the place of another one of its number."""
        self._members[member.number] = member

    def up(self, member: ReplicaMember, now: float) -> None:
        """It takes sessions from now on. Those that waited for another one leave."""
        waited = [each for each in self._members.values() if each.leaves and each.state != "draining"]
        self.become(member, "up")
        self._routing.joined(member.number)
        for each in waited:
            self.leave(each.number, now)

    def ended(self, member: ReplicaMember) -> State:
        """It is gone: returns what it was. May be called again."""
        if self._members.get(member.number) is member:
            del self._members[member.number]
        was = member.state
        if was == "gone":
            return was
        self.become(member, "ends")
        member.close()
        if was != "starting":
            self._routing.gone(member.number)
        return was

    def leave(self, number: int, now: float) -> None:
        """It is to leave: now, or with none ready beside it when `look` says so."""
        member = self._members.get(number)
        if member is None or member.state not in ("ready", "stalled"):
            return
        if any(each is not member for each in self.those("ready")):
            self._drain(member, now + self._drain_s)
        else:
            member.leaves = True

    def stay(self, member: ReplicaMember) -> None:
        """It is to leave when another one is ready."""
        member.leaves, member.until = True, math.inf

    def _drain(self, member: ReplicaMember, until: float) -> None:
        """Its sessions move as soon as nothing runs in them, or `until` then."""
        self.become(member, "drains")
        member.leaves, member.until, member.drained = True, until, True
        self._routing.shut(member.number)
        sessions = self._bindings.at(member.number)
        log.info("a replica drains", replica=member.number, sessions=len(sessions))
        self._move(sessions, True)

    # --- time ------------------------------------------------------------------------------------

    def look(self, now: float) -> list[ReplicaMember]:
        """Have those leave whose time has come, and hurry sessions. Returns who is to be dismissed."""
        done = []
        for member in self:
            if not member.leaves:
                continue
            if member.state != "draining":
                if member.until is None:
                    until = None if member.fault_since is not None else self._succeed(member, now)
                    member.until = now if until is None else until
                if now >= member.until:
                    self._drain(member, now)
            if member.state == "draining" and member.until is not None:
                sessions = self._bindings.at(member.number)
                if not sessions and not self._bindings.leaving(member.number):
                    member.until = None
                    done.append(member)
                elif now >= member.until:
                    member.until = now + HURRY_SECONDS
                    self._bindings.stay(member.number)
                    self._move(sessions, False)
        return done

    def relieve(self, now: float, patience: float) -> None:
        """Take its sessions from one that made no progress for so long, if another one does."""
        for member in self.those("stalled"):
            if member.fault_since is None:
                self.become(member, "goes on")
                self._routing.resume(member.number)
                self._bindings.moves.stalls(member.number, False)
        ready = self.those("ready")
        if self.those("stalled") or all(each.fault_since is not None for each in ready):
            return  # one at a time: its sessions may be why
        for member in ready:
            if member.fault_since is not None and now - member.fault_since >= patience:
                self.become(member, "stalls")
                self._bindings.moves.stalls(member.number, True)
                self._routing.shut(member.number)
                sessions = self._bindings.at(member.number)
                log.warning("a replica has stalled", replica=member.number, sessions=len(sessions))
                self._move(sessions, False)
                return
