"""The commands' way to the engine, which `clients` may not import.

The client library must work without the engine (and without torch), so nothing in it imports
`ramify.actors`. The console script, an entry point, composes the two: it loads the engine by name,
here and nowhere else, when a command needs it.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import msgspec

from ramify.protocol.config import EngineConfig, LogConfig
from ramify.protocol.errors import ConfigError, RamifyError

Progress = Callable[[str, float], None]


class EngineStopped(RamifyError):
    """The engine ended by a fault of its own."""


class EngineMissing(ConfigError):
    """This installation is the client alone."""


def load(module: str) -> Any:
    """Import a module that only an installation with the engine has. Raises EngineMissing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if missing in ("ramify.actors", "ramify.gpu"):
            missing = "ramify-engine"
        elif missing.startswith("ramify."):
            raise  # the engine is here, and has a fault
        raise EngineMissing(
            f"the engine is not installed ({missing} is missing): "
            f"{sys.executable} -m pip install 'ramify[serve]'; in a clone: make serve"
        ) from None


def configure_log(config: LogConfig) -> None:
    """Set up the engine's log (on stderr)."""
    log = load("ramify.actors.kit.log")
    if config.format == "json":  # whatever else this process or its children print is wrapped
        load("ramify.actors.kit.console").json_console(config)
    else:
        log.configure(config)


def serve(config: EngineConfig, progress: Progress) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError, ModelError, EngineStopped."""

    async def run() -> None:
        async with _engine(config) as (engine, begun):
            await engine.serve(config, progress=progress, begun=begun)

    asyncio.run(run())


def join(
    host: str,
    port: int,
    secret_file: Path,
    *,
    tls_ca: Path | None,
    model: Path | None,
    device: Any,
) -> None:
    """Run a replica of the front at this address, until SIGTERM or until the front wants none any more.

    `model`, `device`: what is other here than there. Raises ConfigError, ModelError, EngineStopped.
    """
    joining, tcp, handshake = (
        load(f"ramify.actors.{name}") for name in ("cluster.joining", "links.tcp", "links.handshake")
    )
    tls = None
    if tls_ca is not None:
        try:
            tls = tcp.client_context(tls_ca.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--tls-ca {tls_ca} cannot be read: {error}") from error

    def adapt(config: EngineConfig) -> EngineConfig:
        changed: dict[str, Any] = {}
        if model is not None:
            changed["path"] = model
            changed["name"] = config.model.name or config.model.path.name
        if device is not None:
            changed["device"] = device
        return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changed))

    secret = tcp.read_secret(secret_file)
    try:
        asyncio.run(joining.join(host, port, secret, tls=tls, adapt=adapt))
    except BaseExceptionGroup as group:
        found: BaseException = group
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if isinstance(found, handshake.Stranger):
            raise ConfigError(f"{host}:{port}: {found}") from group
        if isinstance(found, RamifyError):
            raise found from group
        raise EngineStopped(f"the replica failed: {found}") from group


@contextmanager
def store(
    place: str, key_file: Path | None = None, *, writes: bool, converts: bool = False
) -> Iterator[Any]:
    """Open the store at `place`, a file or a URL: `actors.store.base.Store`. Raises ConfigError.

    `writes`: no server may run on a file meanwhile. `key_file`, `converts`: as of `open_store`.
    """
    base, opening = (load(f"ramify.actors.store.{name}") for name in ("base", "opening"))
    try:
        with (opening.claim_store(place) if writes else None) or nullcontext():
            if writes:  # one that was killed may have left what it had taken
                opening.unclaimed(place)
            opened = opening.open_store(place, key_file, read_only=not writes, converts=converts)
            try:
                yield opened
            finally:
                opened.close()
    except base.StoreError as error:
        raise ConfigError(str(error)) from error


def keys(key_file: Path) -> Any:
    """Make `actors.store.sealed.Keys`, to seal and unseal items elsewhere. Raises ConfigError."""
    base, opening = (load(f"ramify.actors.store.{name}") for name in ("base", "opening"))
    try:
        return opening.sealing().read_keys(key_file)
    except base.StoreError as error:
        raise ConfigError(str(error)) from error


def check_saved(items: Mapping[str, bytes]) -> None:
    """Check a session of a store as imports of clients are checked. Raises ConfigError."""
    exports = load("ramify.actors.session.durable.exports")
    try:
        exports.check_saved(items)
    except exports.Unsound as error:
        raise ConfigError(error.why) from error


@contextmanager
def embedded(config: EngineConfig, progress: Progress) -> Iterator[str]:
    """Run an engine in a thread of this process; gives its URL. Raises as `serve` does."""
    started = threading.Event()
    host = _Host(config, progress, started)
    thread = threading.Thread(target=host.run, name="ramify-engine", daemon=True)
    thread.start()
    try:
        started.wait()
        if host.error is not None:
            raise host.error
        yield host.url
    finally:
        host.stop()
        thread.join()


class _Host:
    """Runs the engine in a loop of its own until `stop`."""

    def __init__(self, config: EngineConfig, progress: Progress, started: threading.Event) -> None:
        self.url = ""
        self.error: BaseException | None = None
        self._config = config
        self._progress = progress
        self._started = started
        self._stopping: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        stopping = asyncio.Event()
        self._stopping = (asyncio.get_running_loop(), stopping)
        config, progress = self._config, self._progress
        async with (
            _engine(config) as (engine, begun),
            engine.running_engine(config, progress=progress, begun=begun) as running,
        ):
            self.url = running.url
            self._started.set()
            await stopping.wait()

    def stop(self) -> None:
        if self._stopping is not None:
            loop, stopping = self._stopping
            if not loop.is_closed():
                loop.call_soon_threadsafe(stopping.set)


@asynccontextmanager
async def _engine(config: EngineConfig) -> AsyncIterator[tuple[Any, Any]]:
    """Import the engine's module while its executor, if it has one of its own, loads the model.

    Faults of the engine become one-line errors.
    """
    executor = load("ramify.actors.executor.process_executor")
    async with executor.loading(config) as begun:
        engine = load("ramify.actors.engine")
        with _faults(engine, config):
            yield engine, begun


@contextmanager
def _faults(engine: Any, config: EngineConfig) -> Iterator[None]:
    try:
        yield
    except engine.EngineFailed as error:
        raise EngineStopped(str(error)) from error
    except OSError as error:
        server = config.server
        raise ConfigError(f"cannot serve at {server.host}:{server.port}: {error}") from error


def log_progress() -> Progress:
    """Show progress as log records, one for each phase."""
    log = load("ramify.actors.kit.log").get_log("ramify.start")
    phase = ""

    def report(what: str, done: float) -> None:
        nonlocal phase
        if what != phase:
            log.info("starting", phase=what)
        phase = what

    return report


def show_progress(out: TextIO) -> Progress:
    """Show progress on one line of a terminal, or one line for each phase elsewhere."""
    phase = ""

    def report(what: str, done: float) -> None:
        nonlocal phase
        if out.isatty():
            out.write(f"\r\x1b[K{what} {done:.0%}" if done < 1 else f"\r\x1b[K{what}\n")
        elif what != phase:
            out.write(f"{what}\n")
        phase = what
        out.flush()

    return report
