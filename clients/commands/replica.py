"""`ramify replica`: compute for a front on another machine."""

import argparse
from pathlib import Path

from ramify.clients.commands import engine
from ramify.clients.commands.flags import add_flags
from ramify.clients.commands.settings import address
from ramify.protocol.config import LogConfig


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "replica",
        help="compute for `ramify serve --replicas-on join` on another machine",
        description="Joins a front, which says which model to load; comes back when the front does. At "
        "SIGTERM the front takes its sessions elsewhere first.",
    )
    parser.add_argument(
        "--join", required=True, metavar="HOST:PORT", help="the front's --replica-listen"
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="the same as the front's --replica-secret-file",
    )
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="the front's certificate (PEM), if it has one"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="where the model is here, if it is elsewhere"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        help="where to run it here (default: as the front says)",
    )
    add_flags(parser, [LogConfig], every=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a replica. Raises ConfigError, ModelError, EngineStopped."""
    engine.configure_log(LogConfig(level=args.log_level, format=args.log_format))
    host, port = address(args.join, "--join")
    engine.join(host, port, args.secret_file, tls_ca=args.tls_ca, model=args.model, device=args.device)
    return 0
