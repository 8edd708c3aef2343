"""Replicas as Ray actors: Ray places them, notices that they have died, and starts them again.

Each actor is a process that joins the front as `ramify replica` does; what they exchange goes over
links, not through Ray. Ray is the extra `ray`.
"""

import ipaddress
import os
import sys
from typing import Any, Literal

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from ramify.actors.cluster.ray_replicas import Drive
from ramify.actors.kit.log import configured, get_log
from ramify.actors.processes.messages import NotStarted
from ramify.protocol.errors import ConfigError

LOOK_SECONDS, MOST_BACK_OFF = 1.0, 30.0
PATIENCE_SECONDS = 120.0  # that an actor waits for its front, if Ray does not end it before
ATTEMPTS = 4  # looks in a row that find failed actors, before one has ever been ready

log = get_log("ramify.actors.cluster.ray")


def _is(host: str, kind: Literal["loopback", "unspecified"]) -> bool:
    """Whether it is an address of this kind. No name is."""
    try:
        return bool(getattr(ipaddress.ip_address(host), f"is_{kind}"))
    except ValueError:
        return False


class ReplicaActor:
    """The actor's class. Ray runs `run` again when its process has died."""

    def run(
        self, host: str, port: int, secret: bytes, pem: str | None, name: str, log_config: bytes
    ) -> str:
        """Serve the front until it says that nothing more is wanted."""
        import asyncio

        import msgspec

        from ramify.actors.cluster.joining import join
        from ramify.actors.kit.console import configure_process
        from ramify.actors.links.tcp import client_context
        from ramify.protocol.config import LogConfig

        log_as = msgspec.msgpack.decode(log_config, type=LogConfig | None)
        if log_as is not None:
            configure_process(log_as)
        tls = client_context(pem) if pem is not None else None
        joined = join(host, port, secret, tls=tls, name=name, signals=False, patience=PATIENCE_SECONDS)
        asyncio.run(joined)
        return name


class RayActors:
    """`drive.count` actors, or as many as `scale` says."""

    def __init__(self, drive: Drive) -> None:
        try:
            import ray  # pyright: ignore[reportMissingImports] - optional
        except ImportError as error:
            raise ConfigError(
                f"--replicas-on ray needs Ray: {sys.executable} -m pip install 'ramify[ray]', or leave "
                "the flag out for processes on this machine"
            ) from error
        self._ray: Any = ray
        settings = drive.settings
        self._settings = settings
        self._where = drive.host, drive.port, drive.secret, drive.pem
        self._gpus = settings.gpus if settings.gpus is not None else float(drive.device == "cuda")
        self.wanted = drive.count  # how many there should be
        self._count = 0
        self._failures = 0  # looks in a row that found failed actors
        self.proven = drive.proven  # a replica has been ready: what fails now may pass
        self._ranks = drive.ranks
        # by name: the actor, what its run returns, and its placement group, if it has one
        self._actors: dict[str, tuple[Any, Any, Any]] = {}

    @property
    def names(self) -> list[str]:
        """The actors that run."""
        return list(self._actors)

    def scale(self, count: int) -> None:
        """Have so many from now on. More are started here; fewer: their front dismisses some."""
        self.wanted = count

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Until cancelled, which ends them."""
        try:
            await anyio.to_thread.run_sync(self.connect)
            started = False
            while True:
                await anyio.to_thread.run_sync(self.look)
                if not started:
                    started = True
                    task_status.started()
                await anyio.sleep(min(LOOK_SECONDS * 2**self._failures, MOST_BACK_OFF))
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._close)

    # --- in a thread: Ray's calls block ------------------------------------------------------------

    def connect(self) -> None:
        ray, address = self._ray, self._settings.ray_address
        try:
            ray.init(
                address=address or "local",
                include_dashboard=False if address is None else None,
                ignore_reinit_error=True,
                log_to_driver=True,
                namespace="ramify",
                # What is installed here, and a folder like ours, has to be on the other machines, too.
                **({} if address else {"num_cpus": max(os.cpu_count() or 1, self._settings.count)}),
            )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ConfigError(f"Ray at {address or 'this machine'} cannot be used: {error}") from error
        except ray.exceptions.AuthenticationError as error:
            raise ConfigError(
                f"Ray at {address} wants its token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH as on its nodes"
            ) from error
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        log.info("Ray is there", address=address or "local", nodes=nodes)
        self._where = self._reachable(nodes), *self._where[1:]

    def _reachable(self, nodes: int) -> str:
        """The host by which actors find the front. Raises ConfigError."""
        host = self._where[0]
        if _is(host, "unspecified"):  # it listens everywhere: as Ray calls this machine, so can they
            named = str(self._ray.util.get_node_ip_address())
            log.info("replicas are told this node's address", host=named, port=self._where[1])
            return named
        if nodes > 1 and (host == "localhost" or _is(host, "loopback")):
            raise ConfigError(
                f"--replica-listen {host} cannot be reached from the {nodes - 1} other nodes of this "
                "Ray cluster: give an address of this machine and a port that they reach: 0.0.0.0:7000"
            )
        return host

    def look(self) -> None:
        """Forget actors that are done, start those that are missing. Raises NotStarted."""
        ray = self._ray
        why = ""
        for name, (actor, run, group) in list(self._actors.items()):
            done, _ = ray.wait([run], timeout=0)
            if not done:
                continue
            del self._actors[name]
            try:
                ray.get(run)
                self._failures = 0
                log.info("an actor has left", actor=name)
            except ray.exceptions.RayError as error:
                why = str(error).splitlines()[-1]
                log.error("an actor has failed", actor=name, reason=why)
            self._end(actor, group)
        if why:
            self._failures = min(self._failures + 1, 8)
            if self._failures >= ATTEMPTS and not self.proven:
                raise NotStarted(f"actors on Ray have failed {ATTEMPTS} times: {why}")
        while len(self._actors) < self.wanted:
            self._start()

    def _start(self) -> None:
        import msgspec

        name = f"replica-{self._count}"
        self._count += 1
        settings, group = self._settings, self._group()
        kind = self._ray.remote(
            # one lost node takes as few replicas with it as can be
            scheduling_strategy="SPREAD" if group is None else self._within(group),
            num_cpus=settings.cpus,
            num_gpus=self._gpus,
            max_restarts=-1,
            max_task_retries=-1,
        )(ReplicaActor)
        actor = kind.remote()
        logs = msgspec.msgpack.encode(configured())
        self._actors[name] = actor, actor.run.remote(*self._where, name, logs), group
        log.info("an actor is started", actor=name, cpus=settings.cpus, gpus=self._gpus)

    def _group(self) -> Any:
        """For a replica of several ranks: its GPUs, on one host, which it keeps while it is started
        again. None: it has none.
        """
        wanted = {"CPU": self._settings.cpus, "GPU": self._gpus}
        bundle = {kind: count for kind, count in wanted.items() if count}
        if self._ranks == 1 or not bundle:
            return None
        return self._ray.util.placement_group([bundle], strategy="STRICT_PACK")

    def _within(self, group: Any) -> Any:
        strategies = self._ray.util.scheduling_strategies
        return strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)

    def _end(self, actor: Any, group: Any) -> None:
        self._ray.kill(actor)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    def _close(self) -> None:
        ray = self._ray
        if ray.is_initialized():
            for actor, _, group in self._actors.values():
                self._end(actor, group)
            ray.shutdown()
