"""Flags of a server with replicas, and the `ReplicasConfig` that they make."""

import argparse
from pathlib import Path

from ramify.protocol.config import ReplicasConfig
from ramify.protocol.errors import ConfigError


def add_replica_flags(parser: argparse.ArgumentParser) -> None:
    """Several cores behind one front."""
    group = parser.add_argument_group(
        "replicas", "the model several times, behind one port; sessions move when a replica goes"
    )
    known = ReplicasConfig(count=1)
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="how many are kept running, each in a process of its own, on a machine with several GPUs "
        "each on one of them (default: none, the model runs in the server)",
    )
    group.add_argument(
        "--replicas-max",
        type=int,
        metavar="N",
        help="start more, up to so many, while first tokens are later than --replica-ttft, and end them "
        "again when they are not needed (default: always --replicas)",
    )
    group.add_argument(
        "--replicas-on",
        choices=["processes", "ray", "join"],
        default="processes",
        help="processes: of this machine; ray: actors of a Ray cluster (needs the extra `ray`); join: "
        "none is started, each comes by `ramify replica` (default processes)",
    )
    group.add_argument(
        "--replica-listen",
        default=f"{known.listen}:0",
        metavar="HOST:PORT",
        help="where replicas join, for ray and join; 0: any free port (default 127.0.0.1:0)",
    )
    group.add_argument(
        "--replica-advertise",
        metavar="HOST",
        help="the name by which replicas reach it, where that is another one",
    )
    group.add_argument(
        "--replica-secret-file",
        type=Path,
        metavar="FILE",
        help="what replicas must know to join, 16 bytes or more (with ray one is made up)",
    )
    for name, text in (
        ("--replica-tls-cert", "encrypt links, with this certificate (PEM)"),
        ("--replica-tls-key", "its key"),
    ):
        group.add_argument(name, type=Path, metavar="FILE", help=text)
    group.add_argument(
        "--ray-address", metavar="ADDRESS", help="of a Ray cluster (default: one on this machine)"
    )
    group.add_argument(
        "--replica-gpus",
        type=float,
        metavar="X",
        help="of each replica, for Ray (default: 1 with --device cuda, else 0)",
    )
    group.add_argument(
        "--replica-cpus",
        type=float,
        default=known.cpus,
        metavar="X",
        help=f"of each replica, for Ray (default {known.cpus:g})",
    )
    for flag, default, text in (
        ("--replica-ttft", known.ttft_s, "to the first token that are too many, for --replicas-max"),
        ("--replica-silence", known.silence_s, "without a word after which a replica has hung"),
        ("--replica-drain", known.drain_s, "that a replica which leaves lets generations run"),
    ):
        group.add_argument(
            flag, type=float, default=default, metavar="S", help=f"seconds {text} (default {default:g})"
        )


def replicas_config(args: argparse.Namespace) -> ReplicasConfig | None:
    """None: one core, in the server's process. Raises ConfigError that names the flag."""
    host, port = address(args.replica_listen, "--replica-listen")
    joins = args.replicas_on == "join"
    config = ReplicasConfig(
        count=args.replicas if args.replicas is not None else 0 if joins else 1,
        most=args.replicas_max,
        ttft_s=args.replica_ttft,
        on=args.replicas_on,
        listen=host,
        listen_port=port,
        advertise=args.replica_advertise,
        secret_file=args.replica_secret_file,
        tls_cert=args.replica_tls_cert,
        tls_key=args.replica_tls_key,
        ray_address=args.ray_address,
        gpus=args.replica_gpus,
        cpus=args.replica_cpus,
        silence_s=args.replica_silence,
        drain_s=args.replica_drain,
    )
    if args.replicas is not None or joins:
        return config
    for flag, given in (
        ("--replicas-on ray", args.replicas_on == "ray"),
        ("--replicas-max", args.replicas_max is not None),
        ("--ray-address", args.ray_address is not None),
        ("--replica-secret-file", args.replica_secret_file is not None),
        ("--replica-tls-cert", args.replica_tls_cert is not None),
    ):
        if given:
            raise ConfigError(f"{flag} does nothing without --replicas N: say how many")
    return None


def address(given: str, flag: str) -> tuple[str, int]:
    """HOST:PORT, or [HOST]:PORT. Raises ConfigError."""
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5:
        raise ConfigError(f"{flag} is {given!r}: must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
