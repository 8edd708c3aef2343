"""Opens the store that `--store` names. The packages of databases are imported when they are needed."""

import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO

from ramify.actors.kit.log import get_log
from ramify.actors.store.base import Store, StoreError, StoreStarting
from ramify.actors.store.sqlite import SqliteStore, claim
from ramify.protocol.store_url import kind_of, shown

STARTING_SECONDS = 60.0  # for a database that says that it is starting
AGAIN_SECONDS = 0.5
log = get_log(__name__)
_CLASSES = {"postgres": "PostgresStore", "redis": "RedisStore"}


def open_store(
    place: str | Path, key_file: Path | None = None, *, read_only: bool = False, converts: bool = False
) -> Store:
    """The store at `place`, a file or a URL. Raises StoreError.

    `key_file`: keys that encrypt its items; None: they are plain. `converts`: plain items may be among
    the encrypted ones. `read_only`: to look at it beside the servers that use it; a missing store is not
    made.
    """
    if key_file is None:
        store = _open(place, read_only)
        try:
            if store.mark() is not None:
                raise StoreError(f"the store {shown(place)} is encrypted: give its --store-key-file")
        except BaseException:
            store.close()
            raise
        return store
    sealed = sealing()
    keys = sealed.read_keys(key_file)
    store = _open(place, read_only)
    try:
        opened: Store = sealed.SealedStore(store, keys, read_only=read_only, converts=converts)
    except BaseException:
        store.close()
        raise
    return opened


def sealing() -> ModuleType:
    """The module `sealed`, whose package may be missing. Raises StoreError."""
    try:
        return import_module("ramify.actors.store.sealed")
    except ImportError as error:
        raise StoreError(
            f"--store-key-file needs a package: {sys.executable} -m pip install 'ramify[encryption]'"
        ) from error


def _open(place: str | Path, read_only: bool) -> Store:
    kind = kind_of(place)
    if kind == "file":
        return SqliteStore(Path(place), read_only=read_only)
    try:
        module = import_module(f"ramify.actors.store.{kind}")
    except ImportError as error:
        raise StoreError(
            f"--store {shown(place)} needs a package: {sys.executable} -m pip install 'ramify[{kind}]'"
        ) from error
    store: Store = getattr(module, _CLASSES[kind])(str(place), read_only=read_only)
    return store


def claim_store(place: str | Path) -> IO[bytes] | None:
    """Keep other servers off a store that has one at a time, until the file that is returned is closed;
    None: several may have it. Raises StoreError.
    """
    return claim(Path(place)) if kind_of(place) == "file" else None


def prepare(place: str | Path, key_file: Path | None = None) -> list[str]:
    """Make the store that a server is to have, once it is claimed. Returns warnings about it.

    Raises StoreError.
    """
    store = _awaited(place, key_file)
    try:
        warnings = store.warnings()
    finally:
        store.close()
    unclaimed(place)
    return warnings


def _awaited(place: str | Path, key_file: Path | None) -> Store:
    """The store, once its database has started."""
    until = time.monotonic() + STARTING_SECONDS
    while True:
        try:
            return open_store(place, key_file)
        except StoreStarting as error:
            if time.monotonic() > until:
                raise
            log.info("waiting for the store", reason=str(error))
            time.sleep(AGAIN_SECONDS)


def unclaimed(place: str | Path) -> None:
    """Whoever had sessions of a store that is claimed now is gone. Raises StoreError."""
    if kind_of(place) == "file":
        file = SqliteStore(Path(place))
        try:
            file.unclaimed()
        finally:
            file.close()
