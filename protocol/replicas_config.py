"""Several cores behind one front. See `settings` for how a setting is declared."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ramify.protocol.errors import ConfigError
from ramify.protocol.settings import DAY_S, Setting, Settings, is_loopback

MOST_REPLICAS = 1024  # of a front


class ReplicasConfig(Settings, frozen=True, kw_only=True):
    """Where replicas run, and how those on other machines join."""

    GROUP: ClassVar[str] = "replicas"
    PREFIX: ClassVar[str] = "replica-"

    # with "join" none is started: they come by themselves
    count: Annotated[
        int,
        Setting(
            "how many replicas of the model run; each in a process of its own, on a machine with "
            "several GPUs each on one of them",
            flag="--replicas",
            low=0,
            high=MOST_REPLICAS,
            default="none, the model runs in the server",
            first=True,
        ),
    ]
    most: Annotated[
        int | None,
        Setting(
            "start more, up to so many, while first tokens are later than --replica-ttft, and end them "
            "again when they are not needed",
            flag="--replicas-max",
            low=1,
            high=MOST_REPLICAS,
            default="always --replicas",
        ),
    ] = None
    on: Annotated[
        Literal["processes", "ray", "join"],
        Setting(
            "processes: of this machine; ray: actors of a Ray cluster (needs the extra `ray`); join: "
            "none is started, each comes by `ramify replica`",
            flag="--replicas-on",
        ),
    ] = "processes"
    roles: Annotated[
        str | None,
        Setting(
            "prefill=K: the first K replicas compute long prompts, which the others go on from; needs "
            "--kv-host",
            flag="--roles",
            default="each does all",
        ),
    ] = None
    listen: Annotated[
        str,
        Setting(
            "where replicas join, for ray and join (gateways at the next ports); 0: any free port",
            unit="HOST:PORT",
            default="127.0.0.1:0",
        ),
    ] = "127.0.0.1"
    listen_port: int = 0  # the end of the same flag
    advertise: Annotated[
        str | None,
        Setting("the name by which replicas reach it, where that is another one", unit="HOST"),
    ] = None
    secret_file: Annotated[
        Path | None,
        Setting("what replicas must know to join, 16 bytes or more (with ray one is made up)"),
    ] = None
    tls_cert: Annotated[Path | None, Setting("encrypt links, with this certificate (PEM)")] = None
    tls_key: Annotated[Path | None, Setting("the key of --replica-tls-cert (PEM)")] = None
    ray_address: Annotated[
        str | None,
        Setting(
            "the Ray cluster to use", flag="--ray-address", unit="ADDRESS", default="one on this machine"
        ),
    ] = None
    gpus: Annotated[
        float | None,
        Setting(
            "GPUs of each replica, for Ray",
            low=0,
            high=64,
            default="one for each rank with --device cuda, else 0",
        ),
    ] = None
    cpus: Annotated[float, Setting("CPUs of each replica, for Ray", low=0, high=4096)] = 1.0
    ttft_s: Annotated[
        float,
        Setting(
            "to the first token that are too many, for --replicas-max",
            low=0.001,
            high=DAY_S,
            unit="seconds",
        ),
    ] = 1.0
    silence_s: Annotated[
        float,
        Setting(
            "without a word after which a replica has hung: its sessions move",
            low=0.5,
            high=DAY_S,
            unit="seconds",
        ),
    ] = 3.0
    drain_s: Annotated[
        float,
        Setting("that a replica which leaves lets generations run", low=0, high=DAY_S, unit="seconds"),
    ] = 30.0

    @property
    def prefill(self) -> int:
        """So many replicas, the first by number, are for long prompts."""
        name, _, count = (self.roles or "prefill=0").partition("=")
        return int(count) if name == "prefill" and re.fullmatch("[0-9]{1,4}", count, re.ASCII) else -1

    def __post_init__(self) -> None:
        super().__post_init__()
        for good, fault in (
            (
                self.roles is None or 0 < self.prefill < (self.count or MOST_REPLICAS),
                f"--roles is {self.roles!r}: must be prefill=K, and K less than --replicas",
            ),
            (
                self.roles is None or self.most is None,
                "--roles does not go with --replicas-max: say how many there are of each",
            ),
            (
                self.count or self.on == "join",
                f"--replicas is {self.count}: must be 1 to {MOST_REPLICAS}",
            ),
            (
                self.most is None or self.most >= self.count,
                f"--replicas-max is {self.most}: must be {self.count} to {MOST_REPLICAS}",
            ),
            (
                self.most is None or self.on != "join",
                "--replicas-max does not go with --replicas-on join: nobody here can start one",
            ),
            (
                0 <= self.listen_port <= 65535,
                f"--replica-listen has port {self.listen_port}: must be at most 65535",
            ),
            (
                (self.tls_cert is None) == (self.tls_key is None),
                "--replica-tls-cert and --replica-tls-key go together",
            ),
            (
                self.on != "join" or self.secret_file is not None,
                "--replicas-on join needs --replica-secret-file: what replicas must know to join",
            ),
            (
                self.ray_address in (None, "local", "auto") or not is_loopback(self.listen),
                f"--replica-listen {self.listen} cannot be reached from other machines of a Ray "
                "cluster: give an address of this one",
            ),
        ):
            if not good:
                raise ConfigError(fault)
