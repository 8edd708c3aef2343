"""The values of `--store`: a file, or the URL of a database that several servers may share. Pure."""

from pathlib import Path
from typing import Literal

from ramify.protocol.errors import ConfigError

Kind = Literal["file", "postgres", "redis"]

SCHEMES: dict[str, Kind] = {
    "postgresql": "postgres",
    "postgres": "postgres",
    "redis": "redis",
    "rediss": "redis",
    "valkey": "redis",
    "valkeys": "redis",
}


def kind_of(store: str | Path) -> Kind:
    """Raises ConfigError for a URL of something else."""
    scheme, colon, _ = str(store).partition("://")
    if not colon or isinstance(store, Path):
        return "file"
    kind = SCHEMES.get(scheme)
    if kind is None:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        begin = f"{scheme[:20]}://"
        raise ConfigError(f"--store begins with {begin!r}: give a file, or a URL with {known}")
    return kind


def shown(store: str | Path) -> str:
    """The store as logs and errors may show it: a URL without user, password and options."""
    scheme, colon, rest = str(store).partition("://")
    if not colon or isinstance(store, Path):
        return str(store)
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
