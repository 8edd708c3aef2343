"""The cores of a front: which of its sessions is where, and what the replicas say to them.

To sessions they are one address; `Bindings` says which replica a message goes to. A replica whose link
ends, or that says nothing for some seconds, is gone: its sessions move, each with all that the front
knows of it, and go on where they were (`SessionCore.change_core`). One that drains gets no new
sessions, and its sessions move as soon as nothing runs in them.

In the engine's process, or in each gateway process (`GatewayCores`). This file does not know how
replicas are started, nor what sessions say.
"""

import socket
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from anyio.abc import TaskStatus

from ramify.actors.cluster.bindings import Bindings
from ramify.actors.cluster.membership import Membership, ReplicaMember
from ramify.actors.cluster.replica_messages import (
    LISTENER,
    Draining,
    FromReplica,
    Hello,
    Up,
)
from ramify.actors.cluster.shift import machine
from ramify.actors.front.core_messages import MAX_FRAME, ForCore, FromCore, News, ToSessions
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.log import get_log
from ramify.actors.kit.report import Report
from ramify.actors.links.link import Link
from ramify.actors.links.tcp import JoinPort, server_context
from ramify.actors.processes.messages import decoder, encoder
from ramify.actors.processes.silence import Silence
from ramify.actors.processes.supervisor import Deaths
from ramify.actors.routing.session_router import SessionRouter
from ramify.actors.watchdog import step_timeout
from ramify.protocol.cluster import KvEvents, ListenKv, MoveAnswer
from ramify.protocol.config import EngineConfig
from ramify.protocol.messages import ChangeCore, Lost, SessionMessage, Tokens
from ramify.protocol.plan import ExecutorInfo

LOOK_SECONDS = 0.25
DEATHS, WITHIN_SECONDS = 8, 60.0  # replicas that died under one session while something of it ran
STALLED = 1 / 60  # of --step-timeout that no progress is made, once that is a fault: sessions leave
PATIENCE_SECONDS = 5.0  # that the last replica, which is to leave, waits for another one to join here

Succeed = Callable[[ReplicaMember, float], float | None]

log = get_log("ramify.actors.cluster")


class Cores:
    """`succeed`: see `Membership`. `listens`: it routes sessions, so it hears what caches have."""

    def __init__(
        self,
        config: EngineConfig,
        routing: SessionRouter,
        clock: Clock,
        succeed: Succeed,
        *,
        listens: bool = True,
    ) -> None:
        assert config.replicas is not None
        self._config = config
        self._settings = config.replicas
        self._clock = clock
        self._listens = listens
        self._deaths: dict[int, Deaths] = {}  # session -> when replicas died under it
        self.routing = routing
        self.moves = 0  # of sessions, from a replica to another
        self.spread: Spread[SessionMessage] | None = None
        self.info: ExecutorInfo | None = None  # of the first that was ready
        shared = config.replicas.on == "processes"
        tell = self._send, self._must, self._answer
        self.bindings = Bindings(routing, *tell, clock.now, shared=shared)
        routing.token_s = self.bindings.moves.token_s
        self.members = Membership(self.bindings, routing, self.move, succeed, config.replicas.drain_s)

    # --- what replicas say -----------------------------------------------------------------------

    def receive(self, member: ReplicaMember, message: Any) -> None:
        """What is for sessions and the router."""
        match message:
            case ToSessions(messages):
                self._told(member, messages)
            case Report():
                member.hears(message, self._clock.now())
                if message.load is not None:
                    self.routing.load(member.number, message.load)
            case News(events):
                self._heard(member, events)

    def _told(self, member: ReplicaMember, messages: list[tuple[int, FromCore]]) -> None:
        spread, bindings, number = self.spread, self.bindings, member.number
        if spread is None:
            return
        here, prefills = bindings.here(number), self.routing.prefills(number)
        heard: list[tuple[int, FromCore]] = []
        going: list[int] = []
        for each in messages:
            session, message = each
            if isinstance(message, MoveAnswer):
                bindings.moves.hears(session, number, message)
            elif session in here:  # it may have left meanwhile
                heard.append(each)
                if isinstance(message, Tokens):
                    if message.finished:
                        bindings.finished(session, message.finished)
                    if prefills and bindings.goes_on(session, number, message):
                        going.append(session)
        spread.put(heard)
        spread.start()
        if going:
            self.move(going)

    def _heard(self, member: ReplicaMember, events: list[KvEvents]) -> None:
        """Its cache has changed. If some of that is missing, it is asked for all."""
        if any(each.reset for each in events):
            member.asked = False
        if not self.routing.events(member.number, events) and not member.asked:
            member.asked = True
            member.must(ListenKv(LISTENER))

    def joined(self, member: ReplicaMember, up: Up) -> bool:
        """It is ready. False: it is of another kind than the others, and was sent away."""
        info, known = up.info, self.info
        other = "" if known is None else _difference(info, known)
        if other:
            flags = "--dtype, --kv-dtype and --quantization"
            member.hung(f"{other}: start all with the same model, {flags}")
            return False
        self.info = known or info
        member.info, member.pid, member.host = info, up.pid, up.host
        member.silence = Silence(self._clock.now())
        whole = self._config.model.tensor_parallel == 1  # else each rank has its part of a block
        blocks = info.host_blocks if whole else 0
        self.bindings.moves.joined(member.number, blocks, info.block_bytes, info.device)
        self.members.up(member, self._clock.now())
        if self._listens:
            member.must(ListenKv(LISTENER))
        self.bindings.place()
        return True

    def gone(self, member: ReplicaMember) -> bool:
        """Its link has ended: its sessions move at once. False: it was not there (any more)."""
        if self.members.ended(member) in ("starting", "gone"):
            return False
        ran = set() if member.drained else self.bindings.busy(member.number)
        sessions = self.bindings.gone(member.number)
        if sessions:
            log.warning("sessions move", replica=member.number, sessions=len(sessions))
        self.move(sessions, ran=ran)
        return True

    # --- sessions that move ----------------------------------------------------------------------

    def move(self, sessions: list[int], quietly: bool = False, *, ran: Collection[int] = ()) -> None:
        """Those first in which something runs. `ran`: those in which it did when their replica died."""
        spread = self.spread
        if spread is None:
            return
        now = self._clock.now()
        for session in sessions:
            if session in ran and self._deadly(session, now):
                spread.put([(session, Lost(f"{DEATHS} replicas died with it"))])
                continue
            self.moves += 1
            spread.put([(session, ChangeCore(quietly))])
        spread.start()

    def _deadly(self, session: int, now: float) -> bool:
        """Whether so many replicas have died under a session that it may be the cause."""
        deaths = self._deaths.setdefault(session, Deaths(DEATHS - 1, WITHIN_SECONDS))
        if len(self._deaths) > 1024:
            recent = now - WITHIN_SECONDS
            self._deaths = {s: d for s, d in self._deaths.items() if not d.times or d.times[-1] > recent}
        return deaths.too_many(now)

    # --- time ------------------------------------------------------------------------------------

    def begin(self, spread: Spread[SessionMessage]) -> None:
        """`spread`: how sessions are reached. Look from now on."""
        self.spread = spread
        for member in self.members:
            member.silence = Silence(self._clock.now())

    def look(self, now: float) -> list[ReplicaMember]:
        """Notice replicas that have hung, and hurry sessions. Returns those that have none any more."""
        for member in self.members.those("ready", "stalled", "draining"):
            silent = member.silence.tick(now)
            if silent > self._settings.silence_s:
                member.hung(f"it was silent for {silent:.1f} s")
        done = self.members.look(now)
        if self.info is not None:
            patience = STALLED * step_timeout(self._config.step_timeout_s, self.info.device)
            self.members.relieve(now, patience)
        self.bindings.place()
        self.bindings.bring()
        self.bindings.moves.look()
        return done

    # --- addresses -------------------------------------------------------------------------------

    def _send(self, replica: int, message: ForCore) -> None:
        member = self.members.get(replica)
        assert member is not None
        member.send(message)

    def _must(self, replica: int, message: ForCore) -> None:
        member = self.members.get(replica)
        if member is not None:
            member.must(message)

    def _answer(self, session: int, message: FromCore) -> None:
        if self.spread is not None:
            self.spread.put([(session, message)])
            self.spread.start()


class GatewayCores:
    """The cores of gateway process `worker`: replicas of the engine, which join here as well."""

    def __init__(self, config: EngineConfig, worker: int, secret: bytes, clock: Clock) -> None:
        assert config.replicas is not None
        self._settings = config.replicas
        self._worker = worker
        self._clock = clock
        self._late: list[float] = []
        self._told_moves = 0
        routing = SessionRouter(clock.now, late=self._first_token, prefill=config.replicas.prefill)
        self.cores = Cores(config, routing, clock, lambda member, now: now + PATIENCE_SECONDS)
        self._port = JoinPort(secret, self._joins)

    @property
    def bindings(self) -> Bindings:
        """What sessions tell."""
        return self.cores.bindings

    async def listen(self, sock: socket.socket) -> None:
        """Replicas join at this socket. Raises ConfigError."""
        cert, key = self._settings.tls_cert, self._settings.tls_key
        await self._port.take(sock, server_context(cert, key) if cert and key else None)

    async def run(self, spread: Spread[SessionMessage], *, task_status: TaskStatus[None]) -> None:
        """Until cancelled."""
        self.cores.begin(spread)
        task_status.started()
        try:
            while True:
                now = self._clock.now()
                self.cores.look(now)
                await self._clock.sleep_until(now + LOOK_SECONDS)
        finally:
            self._port.close()
            for member in self.cores.members:
                member.close()

    def news(self) -> tuple[int, list[float]]:
        """How many sessions moved since the last call, and how late first tokens were, in seconds."""
        moves, self._told_moves = self.cores.moves - self._told_moves, self.cores.moves
        late, self._late = self._late, []
        return moves, late

    def _first_token(self, seconds: float) -> None:
        if len(self._late) < 1024:
            self._late.append(seconds)

    def _joins(self, open_link: Callable[..., Link[Any, Any]], peer: str) -> None:
        member = ReplicaMember(-1)  # its number comes with its `Up`
        link = open_link(
            f"replica at {peer}",
            decoder(FromReplica),
            encoder(),
            on_message=partial(self._receive, member),
            on_end=lambda error: self.cores.gone(member),
            max_frame=MAX_FRAME,
        )
        member.begin(link, Hello(self._worker, self._clock.now(), machine()))

    def _receive(self, member: ReplicaMember, message: FromReplica) -> None:
        member.silence.heard()
        match message:
            case Up():
                before = self.cores.members.get(up := message.number)
                if before is not None:  # its end is not known here yet
                    before.end()
                    self.cores.gone(before)
                member.number = up
                self.cores.members.add(member)
                self.cores.joined(member, message)
            case Draining():
                self.cores.members.leave(member.number, self._clock.now())
            case _:
                self.cores.receive(member, message)
        member.consumed()


_NUMBERS = ("dtype", "kv_dtype", "quantization")
_SAME = ("model", "parameters", "vocab_size", "context", "eos_token_ids", *_NUMBERS)


def _difference(info: ExecutorInfo, known: ExecutorInfo) -> str:
    """What makes texts of two replicas different, in words; empty: nothing that they tell."""
    return ", ".join(
        f"its {name} is {mine!r}, the others' {theirs!r}"
        for name in _SAME
        if (mine := getattr(info, name)) != (theirs := getattr(known, name))
    )
