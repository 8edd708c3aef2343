"""The replicas of a front: a table of states and of what changes them, and who leaves when.

    starting --up--> ready --stalls--> stalled        from each state --ends--> gone
                     ready <--goes on-- stalled
                     ready, stalled --drains--> draining

A replica that drains gets no new sessions, and its sessions move as soon as nothing runs in them. The
last one that is ready serves until another one is, where one is to come. One whose executor makes no
progress has stalled: its sessions leave it, and it gets none until it goes on.

This file does not know links, processes, or how replicas are started. Times are seconds, and arguments.
"""

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Literal

from ramify.actors.cluster.bindings import Bindings
from ramify.actors.cluster.member import ReplicaMember, State
from ramify.actors.kit.log import get_log
from ramify.actors.routing.session_router import SessionRouter

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
                if not sessions:
                    member.until = None
                    done.append(member)
                elif now >= member.until:
                    member.until = now + HURRY_SECONDS
                    self._move(sessions, False)
        return done

    def relieve(self, now: float, patience: float) -> None:
        """Take its sessions from one that made no progress for so long, if another one does."""
        for member in self.those("stalled"):
            if member.fault_since is None:
                self.become(member, "goes on")
                self._routing.resume(member.number)
        ready = self.those("ready")
        if self.those("stalled") or all(each.fault_since is not None for each in ready):
            return  # one at a time: its sessions may be why
        for member in ready:
            if member.fault_since is not None and now - member.fault_since >= patience:
                self.become(member, "stalls")
                self._routing.shut(member.number)
                sessions = self._bindings.at(member.number)
                log.warning("a replica has stalled", replica=member.number, sessions=len(sessions))
                self._move(sessions, False)
                return
