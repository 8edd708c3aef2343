"""How replicas come: started in processes here, or joining over TCP, where Ray may have started them.

This file does not know what the messages mean.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskGroup, TaskStatus
from msgspec.structs import replace

from ramify.actors.cluster.local import environment, gpus, room_beside
from ramify.actors.cluster.membership import Membership, ReplicaMember
from ramify.actors.cluster.ray_replicas import Drive, RayReplicas
from ramify.actors.cluster.replica_messages import Dismiss, FromReplica, StartReplica, ToReplica
from ramify.actors.front.core_messages import MAX_FRAME
from ramify.actors.front.interface import Guard
from ramify.actors.kit.log import get_log
from ramify.actors.links.link import Link
from ramify.actors.links.tcp import JoinPort, server_context
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.messages import encoder
from ramify.actors.processes.supervisor import Attempts, Ended, Policy, keep
from ramify.protocol.config import MOST_REPLICAS, EngineConfig, ReplicasConfig

PROGRAM = "ramify.actors.cluster.replica"

log = get_log(__name__)


@dataclass
class Ends:
    """What their front gives replicas, and hears of them. `proven`: one has been ready."""

    begin: Callable[[int], StartReplica]
    decoder: "msgspec.msgpack.Decoder[Any]"
    receive: Callable[[ReplicaMember, Any], None]
    gone: Callable[[ReplicaMember], None]
    drain: Callable[[int], None]
    proven: asyncio.Event
    stop: asyncio.Event


class LocalReplicas:
    """`wanted` processes; for each number one after the other."""

    def __init__(self, config: EngineConfig, members: Membership, ends: Ends) -> None:
        assert config.replicas is not None
        self.wanted = config.replicas.count
        self._most = config.replicas.most or 0
        self._config = config
        self._members = members
        self._ends = ends
        self._retired: set[int] = set()  # numbers that are not started again
        self._group: TaskGroup | None = None
        self._guard: Guard = lambda name, run: run

    async def start(
        self, group: TaskGroup, guard: Guard, progress: Callable[[str], None], secret: bytes
    ) -> None:
        """Start the first ones."""
        self._group, self._guard = group, guard
        found = gpus(self._config)
        if 0 < len(found) < max(self.wanted, self._most):
            log.warning(
                "replicas share GPUs: give --kv-fraction or --kv-tokens, so that their caches fit",
                gpus=len(found),
            )
        self.scale(self.wanted)

    def scale(self, wanted: int) -> None:
        """Have so many from now on. Fewer: the front has retired some."""
        self.wanted = wanted
        kept = {member.number for member in self._members} - self._retired
        while len(kept) < wanted and self._group is not None:
            number = next(self._members.free())
            self._retired.discard(number)
            kept.add(number)
            run = self._guard(f"replica {number}", partial(self._keep, number))
            self._members.add(ReplicaMember(number))  # its place is taken at once
            self._group.start_soon(partial(run, task_status=TASK_STATUS_IGNORED))

    def retire(self, number: int) -> None:
        """It is not started again."""
        self._retired.add(number)

    def successor(self, member: ReplicaMember, now: float) -> float | None:
        """See `Membership`. The only one has another one started, if there is room for both."""
        if self.wanted == 1:
            if not room_beside(self._config, next(self._members.free()), member.number, member.pid):
                return None
            self.retire(member.number)
            self.scale(1)
        log.info("a replica is to leave, and serves until another one is ready", replica=member.number)
        return math.inf

    def prove(self) -> None:
        """A replica is ready."""

    def close(self) -> None:
        """Processes end with their tasks."""

    async def _keep(self, number: int, *, task_status: TaskStatus[None]) -> None:
        """One process after the other is replica `number`."""
        task_status.started()
        await keep(
            partial(self._one, number),
            Attempts(f"replica {number}", Policy(attempts=None)),
            stop=self._ends.stop,
            wanted=lambda: number not in self._retired,
            proven=self._ends.proven.is_set,
        )

    async def _one(self, number: int) -> Ended:
        """Be replica `number` in one process. Raises OSError."""
        member = ReplicaMember(number)
        self._members.add(member)
        try:
            why = await self._run(member)
        finally:
            self._ends.gone(member)
        if member.drained:
            log.info("a replica has left", replica=number, again=number not in self._retired)
        elif not self._ends.stop.is_set():
            log.error("a replica has ended", replica=number, reason=why)
        return Ended(why, member.info is not None)

    async def _run(self, member: ReplicaMember) -> str:
        """Start a process; return why it has ended. Cancelled, it is dismissed. Raises OSError."""
        child: ChildProcess[ToReplica, FromReplica] = await ChildProcess.start(
            f"replica {member.number}",
            PROGRAM,
            self._ends.decoder,
            encoder(),
            partial(self._ends.receive, member),
            max_frame=MAX_FRAME,
            environment=environment(member.number, self._config),
            on_end=partial(self._ends.gone, member),  # at once, not when the process has ended
        )
        member.ends = child.kill
        member.pid = child.pid
        member.begin(child.link, self._ends.begin(member.number))
        code = await child.ended(lambda: member.tell(Dismiss()))
        return member.why or child.explain(code)


class JoinedReplicas:
    """Those that connect to a port of the front. With Ray, `wanted` of its actors do."""

    def __init__(self, config: EngineConfig, members: Membership, ends: Ends) -> None:
        assert config.replicas is not None
        self.wanted = config.replicas.count
        self._settings: ReplicasConfig = config.replicas
        self._device, self._ranks = config.model.device, config.model.tensor_parallel
        if self._settings.gpus is None and self._device == "cuda":  # Ray gives them on one machine
            self._settings = replace(self._settings, gpus=float(self._ranks))
        self._members = members
        self._ends = ends
        self._port: JoinPort | None = None
        self._ray: RayReplicas | None = None

    async def start(
        self, group: TaskGroup, guard: Guard, progress: Callable[[str], None], secret: bytes
    ) -> None:
        """Open the port, and have Ray start replicas, where it is to. Raises ConfigError."""
        settings = self._settings
        tls = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            tls = server_context(settings.tls_cert, settings.tls_key)
        self._port = JoinPort(secret, self.joins)
        number = await self._port.listen(settings.listen, settings.listen_port, tls)
        host = settings.advertise or settings.listen
        log.info("replicas join here", host=host, port=number, tls=tls is not None)
        progress(f"waiting for replicas at {host}:{number}")
        if settings.on == "ray":
            pem = settings.tls_cert.read_text() if settings.tls_cert is not None else None
            drive = Drive(
                settings, host, number, secret, pem, self._device, self.wanted, ranks=self._ranks
            )
            self._ray = RayReplicas(drive, self.orphaned)
            await group.start(guard("Ray", self._ray.run))

    def scale(self, wanted: int) -> None:
        """Have so many from now on. Fewer: the front dismisses some."""
        self.wanted = wanted
        if self._ray is not None:
            self._ray.scale(wanted)

    def retire(self, number: int) -> None:
        """It ends when it is dismissed, and nobody here starts it again."""

    def successor(self, member: ReplicaMember, now: float) -> float | None:
        """See `Membership`. Who ends a replica elsewhere does not wait for ever, either."""
        return now + self._settings.drain_s if self._members.those("starting") else None

    def prove(self) -> None:
        """A replica is ready."""
        if self._ray is not None:
            self._ray.prove()

    def close(self) -> None:
        """Part with all of them: they may wait for the next front."""
        for member in self._members:
            if self._ray is not None:  # if Ray is gone, nobody else tells it
                member.tell(Dismiss())
            member.close()
        if self._port is not None:
            self._port.close()

    def joins(self, open_link: Callable[..., Link[Any, Any]], peer: str) -> None:
        """Somebody who knows the secret. Raises ConnectionError: there is no place for it."""
        if len(self._members) >= MOST_REPLICAS:
            log.error("too many replicas: one is sent away", most=MOST_REPLICAS, host=peer)
            raise ConnectionRefusedError
        number = next(self._members.free())
        member = ReplicaMember(number)
        member.host = peer
        link = open_link(
            f"replica {number}",
            self._ends.decoder,
            encoder(),
            on_message=partial(self._ends.receive, member),
            on_end=partial(self._link_ended, member),
            max_frame=MAX_FRAME,
        )
        self._members.add(member)
        member.begin(link, self._ends.begin(number))
        log.info("a replica joins", replica=number, host=peer)

    def _link_ended(self, member: ReplicaMember, error: Exception | None) -> None:
        if not self._ends.stop.is_set() and not member.drained:
            reason = member.why or (str(error) if error is not None else "its link has ended")
            log.error("a replica has ended", replica=member.number, reason=reason)
        self._ends.gone(member)

    def orphaned(self) -> None:
        """A new Ray driver has as many started as are wanted: Ray knows nothing of those that are there.

        They leave: on a CPU the last one when a new one is ready, on GPUs at once, as those need them.
        """
        there = self._members.those("ready", "stalled")
        if there and there[-1].info is not None and there[-1].info.device == "cpu":
            self._members.stay(there.pop())
        for member in there:
            self._ends.drain(member.number)
