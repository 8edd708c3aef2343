"""Opens the store that `--store` names. The packages of databases are imported when they are needed."""

from importlib import import_module
from pathlib import Path
from typing import IO

from ramify.actors.store.base import Store, StoreError
from ramify.actors.store.sqlite import SqliteStore, claim
from ramify.protocol.store_url import kind_of, shown

_CLASSES = {"postgres": "PostgresStore", "redis": "RedisStore"}


def open_store(place: str | Path, *, read_only: bool = False) -> Store:
    """The store at `place`, a file or a URL. Raises StoreError.

    `read_only`: to look at it, beside the servers that have it; a store that is not there is not made.
    """
    kind = kind_of(place)
    if kind == "file":
        return SqliteStore(Path(place), read_only=read_only)
    try:
        module = import_module(f"ramify.actors.store.{kind}")
    except ImportError as error:
        raise StoreError(
            f"--store {shown(place)} needs a package: pip install 'ramify[{kind}]'"
        ) from error
    store: Store = getattr(module, _CLASSES[kind])(str(place), read_only=read_only)
    return store


def claim_store(place: str | Path) -> IO[bytes] | None:
    """Keep other servers off a store that has one at a time, until the file that is returned is closed;
    None: several may have it. Raises StoreError.
    """
    return claim(Path(place)) if kind_of(place) == "file" else None


def prepare(place: str | Path) -> list[str]:
    """Make the store that a server is to have, once it is claimed. Returns warnings about it.

    Raises StoreError.
    """
    store = open_store(place)
    try:
        if isinstance(store, SqliteStore):
            store.unclaimed()
        return store.warnings()
    finally:
        store.close()
