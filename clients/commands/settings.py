"""The `EngineConfig` that a server's flags make: what no declaration says of files, places, defaults."""

import argparse
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from ramify.clients.commands.checkpoints import find_model
from ramify.clients.commands.engine import load
from ramify.clients.commands.flags import add_flags, given, or_variable
from ramify.protocol.config import (
    EngineConfig,
    Limits,
    LogConfig,
    ModelConfig,
    ReplicasConfig,
    ScheduleConfig,
    ServerConfig,
)
from ramify.protocol.credentials import CredentialLimits
from ramify.protocol.errors import ConfigError
from ramify.protocol.settings import declared

DEFAULT_MODEL_NOTE = "a small demonstration model; give --model DIR to serve a checkpoint of your own"
SERVER = (  # all settings of `ramify serve`
    ModelConfig,
    EngineConfig,
    ServerConfig,
    CredentialLimits,
    ReplicasConfig,
    ScheduleConfig,
    Limits,
    LogConfig,
)
NEED_REPLICAS = ("--replicas-max", "--ray-address", "--replica-secret-file", "--replica-tls-cert")


def add_model_flags(parser: argparse.ArgumentParser, every: bool) -> None:
    """Add the flags of the model: which one, and how it runs."""
    add_flags(parser, SERVER, every=every, groups=["model"])


def add_server_flags(parser: argparse.ArgumentParser, every: bool) -> None:
    add_flags(parser, SERVER, every=every)


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Make the model's configuration. Raises ConfigError that names the flag."""
    path, name = find_model(args.model) if args.model is not None else (bundled_model(), None)
    fields = given(ModelConfig, args)
    return ModelConfig(**fields | {"path": path, "name": fields["name"] or name})


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Make the configuration of `ramify serve`'s flags. Raises ConfigError that names the flag."""
    server = given(ServerConfig, args)
    server["store"] = store_place(server["store"], args.port)
    limits = CredentialLimits(**given(CredentialLimits, args))
    return EngineConfig(
        model=model_config(args),
        server=ServerConfig(**server, credential_limits=limits),
        limits=Limits(**given(Limits, args)),
        schedule=ScheduleConfig(**given(ScheduleConfig, args)),
        replicas=replicas_config(args),
        **given(EngineConfig, args),
    )


def replicas_config(args: argparse.Namespace) -> ReplicasConfig | None:
    """Make the replicas' configuration; None: one core, in the server's process. Raises ConfigError."""
    fields: dict[str, Any] = given(ReplicasConfig, args)
    count, joins = fields["count"], fields["on"] == "join"
    fields["listen"], fields["listen_port"] = address(fields["listen"], "--replica-listen")
    fields["count"] = count if count is not None else 0 if joins else 1
    config = ReplicasConfig(**fields)
    if count is not None or joins:
        return config
    alone = ["--replicas-on ray"] if config.on == "ray" else []
    for each in declared(ReplicasConfig):
        if each.flag in NEED_REPLICAS and fields[each.field] is not None:
            alone.append(each.flag)
    if alone:
        raise ConfigError(f"{alone[0]} does nothing without --replicas N: say how many")
    return None


def address(given: str, flag: str) -> tuple[str, int]:
    """Read HOST:PORT, or [HOST]:PORT. Raises ConfigError."""
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5:
        raise ConfigError(f"{flag} is {given!r}: must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def store_of(args: argparse.Namespace) -> str | None:
    """Find the store that `--store` and `--port` of another command, or the variable, name;
    None: no store.
    """
    (each,) = (each for each in declared(ServerConfig) if each.field == "store")
    named = each.setting.words.get(args.store, args.store)
    return store_place(or_variable(each, named), args.port)


def store_place(store: str | None, port: int) -> str | None:
    """Find the file or URL of a store, where "auto" means the usual place; None: no store."""
    if store is None or (store == "auto" and port == 0):
        return None
    if store != "auto":
        return store
    state = os.environ.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path.home() / ".local" / "state"
    return str(folder / "ramify" / f"sessions-{port}.db")


def bundled_model() -> Path:
    """Find the model folder that comes with the package. Raises ConfigError if it is not there."""
    folder = Path(str(files(load("ramify.gpu")) / "default_model"))
    if not (folder / "config.json").is_file():
        raise ConfigError("this installation holds no default model: give --model DIR")
    return folder
