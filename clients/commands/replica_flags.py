"""Flags of a server with replicas, and the `ReplicasConfig` that they make."""

import argparse

from ramify.protocol.config import ReplicasConfig


def add_replica_flags(parser: argparse.ArgumentParser) -> None:
    """Several cores behind one front."""
    group = parser.add_argument_group(
        "replicas", "the model several times, behind one port; sessions move when a replica goes"
    )
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="how many are kept running, each in a process of its own, on a machine with several GPUs "
        "each on one of them (default: none, the model runs in the server)",
    )
    known = ReplicasConfig(count=1)
    for flag, default, text in (
        ("--replica-silence", known.silence_s, "without a word after which a replica has hung"),
        ("--replica-drain", known.drain_s, "that a replica which leaves lets generations run"),
    ):
        group.add_argument(
            flag, type=float, default=default, metavar="S", help=f"seconds {text} (default {default:g})"
        )


def replicas_config(args: argparse.Namespace) -> ReplicasConfig | None:
    """None: one core, in the server's process. Raises ConfigError that names the flag."""
    config = ReplicasConfig(
        count=1 if args.replicas is None else args.replicas,
        silence_s=args.replica_silence,
        drain_s=args.replica_drain,
    )
    return config if args.replicas is not None else None
