"""Real database servers for tests: private ones, from the binaries of this machine.

Whoever is root runs them as another user, because PostgreSQL refuses root.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START_SECONDS = 30.0


class Server:
    """A server at `url` that can be stopped, however rudely, and started again with what it had."""

    def __init__(self, folder: Path, user: str | None) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._user = user
        self.port = 0

    @property
    def url(self) -> str:
        raise NotImplementedError

    def start_anywhere(self) -> None:
        """On a port that is free; another process may have it before the server does."""
        for left in (2, 1, 0):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            try:
                self.start()
            except RuntimeError:
                self.stop()
                if not left:
                    raise
            else:
                return

    def command(self) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def empty(self) -> None:
        """Forget all that is stored."""
        raise NotImplementedError

    def start(self) -> None:
        log = self.folder / "log"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command(), stdout=out, stderr=out, user=self._user, cwd=self.folder, process_group=0
            )
        until = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(log.read_text())
            time.sleep(0.02)

    def kill(self) -> None:
        """As if its machine lost power, but for what it had given to the system."""
        if self.process is not None:
            for pid in [*_children(self.process.pid), self.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(10)
            self.process = None

    def lose(self) -> None:
        """Lose all that is stored, while it is stopped."""
        raise NotImplementedError

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """At once: what it has not flushed is in the system's hands."""
        if self.process is not None:
            self.process.send_signal(how)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)
            self.process = None


class Postgres(Server):
    def __init__(self, folder: Path, user: str | None, binaries: Path) -> None:
        super().__init__(folder, user)
        self._binaries = binaries
        self._make()

    def _make(self) -> None:
        subprocess.run(
            [self._binaries / "initdb", "-D", self.folder / "data", "-U", "ramify", "-A", "trust", "-N",
             "-E", "UTF8", "--locale=C"],
            check=True, capture_output=True, user=self._user, cwd=self.folder,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"postgresql://ramify:secret@127.0.0.1:{self.port}/postgres"

    def command(self) -> list[str]:
        # What no commit flushes is surely lost in a crash: the database seldom does it by itself.
        settings = {"fsync": "off", "max_connections": 60, "shared_buffers": "16MB"}
        settings |= {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self._binaries / "postgres"), "-D", str(self.folder / "data"), "-k", "",
                "-h", "127.0.0.1", "-p", str(self.port), *options]  # fmt: skip

    def ready(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True

    def lose(self) -> None:
        shutil.rmtree(self.folder / "data")
        self._make()

    def empty(self) -> None:
        import psycopg

        with psycopg.connect(self.url) as db:
            for name in ("about", "gone", "holders", "items", "sessions"):
                db.execute(f"DROP TABLE IF EXISTS ramify_{name} CASCADE")


class Redis(Server):
    def __init__(self, folder: Path, user: str | None, binary: str) -> None:
        super().__init__(folder, user)
        self._binary = binary

    @property
    def url(self) -> str:
        return f"redis://:secret@127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        return [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--requirepass", "secret",
                "--dir", str(self.folder), "--appendonly", "yes", "--appendfsync", "always",
                "--save", ""]  # fmt: skip

    def ready(self) -> bool:
        import redis

        with redis.Redis.from_url(self.url) as db:
            try:
                return bool(db.ping())
            except redis.RedisError:
                return False

    def lose(self) -> None:
        shutil.rmtree(self.folder / "appendonlydir")

    def empty(self) -> None:
        import redis

        with redis.Redis.from_url(self.url) as db:
            db.flushall()


def _children(pid: int) -> list[int]:
    """The processes that this one has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in found.read_text().split()] if found.exists() else []


def emptied(server: Server) -> str:
    """Its URL, once it has forgotten everything."""
    if server.process is None:
        server.start()
    server.empty()
    return server.url


def _user() -> str | None:
    if os.getuid():
        return None
    for name in ("postgres", "redis", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    return "nobody"


@contextmanager
def _running(kind: type[Server], *binaries: object) -> Iterator[Server]:
    user = _user()
    with tempfile.TemporaryDirectory(prefix="ramify-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        server = kind(folder, user, *binaries)  # type: ignore[arg-type]
        server.start_anywhere()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def running_postgres() -> Iterator[Server | None]:
    """None: this machine has no PostgreSQL server."""
    found = shutil.which("initdb")
    places = [Path(found).parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    place = next((each for each in places if (each / "initdb").exists()), None)
    if place is None:
        yield None
        return
    with _running(Postgres, place) as server:
        yield server


@contextmanager
def running_redis() -> Iterator[Server | None]:
    """None: this machine has neither Redis nor Valkey."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        yield None
        return
    with _running(Redis, binary) as server:
        yield server
