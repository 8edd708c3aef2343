"""What each store costs a token: none, a file, an encrypted file, PostgreSQL, Redis, side by side.

    python benchmarks/stores.py [--sockets 64] [--tokens 200] [--step-ms 10] [--rounds 3] [--json FILE]
                                [--only none file] [--persist sync]

In each round every kind gets a new server (a real engine with the fake executor) and an empty store, one
after the other. So many sockets generate at once.

    saver      CPU time of what finds out what is to be saved, on the event loop, over the tokens that
               were delivered, from `generate` until all is saved
    writer     the same of the store's thread
    server     the same of the whole process, in which a busy machine shows most
    database   the same of the database's processes
    items      bytes of all items over the tokens, prompts and what is known of a session among them
    taken      what the store takes on its disk (SQLite: with its log) or in its memory, likewise

PostgreSQL and Redis are private ones, started from the binaries of this machine; PostgreSQL without
`fsync`, Redis with `appendfsync always`, in a temporary folder. A kind without its binaries is left out.
"""

import argparse
import asyncio
import base64
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from fake_server import FakeServer
from load import ChunkRecorder
from overhead import PROMPT
from report import headline, machine, table, write_json

from ramify.actors.store.opening import open_store

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests.servers`
KINDS = ["none", "file", "encrypted", "postgres", "redis"]
COLUMNS = [
    "store",
    "saver us",
    "writer us",
    "server us",
    "database us",
    "items B",
    "taken B",
    "tokens/s",
]
PARTS = ["saver", "writer"]
SAVED_SECONDS = 1.6  # after the last token everything is saved


class StorePlace:
    """Where a store is. `size()`: its bytes there; `pid`: of the database's server, if it has one."""

    def __init__(self, url: str, size: Callable[[], int], pid: int | None = None) -> None:
        self.url = url
        self.size = size
        self.pid = pid
        self.key_file: Path | None = None

    def cpu(self) -> float:
        """Seconds that the database's processes have had; those that ended among them are missing."""
        if self.pid is None:
            return 0.0
        root = psutil.Process(self.pid)
        times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def saved(self) -> int:
        """Bytes of all items."""
        store = open_store(self.url, self.key_file, read_only=True)
        try:
            return sum(kept.size for kept in store.kept())
        finally:
            store.close()


@contextmanager
def _file(encrypted: bool) -> Iterator[StorePlace]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "s.db"
        place = StorePlace(str(path), lambda: sum(each.stat().st_size for each in folder.glob("s.db*")))
        if encrypted:
            place.key_file = folder / "key"
            place.key_file.write_bytes(base64.b64encode(os.urandom(32)))
            place.key_file.chmod(0o600)
        yield place


def _postgres(server: Any) -> StorePlace:
    import psycopg

    from tests.servers import emptied

    def size() -> int:
        with psycopg.connect(server.url) as db:
            row = db.execute(
                "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class "
                "WHERE relname LIKE 'ramify%' AND relkind = 'r'"
            ).fetchone()
        return int(row[0]) if row is not None else 0

    return StorePlace(emptied(server), size, server.process.pid)


def _redis(server: Any) -> StorePlace:
    import redis

    from tests.servers import emptied

    def size() -> int:
        with redis.Redis.from_url(server.url) as db:
            return int(db.info("memory")["used_memory_dataset"])

    return StorePlace(emptied(server), size, server.process.pid)


async def _run(
    server: FakeServer, place: StorePlace | None, options: argparse.Namespace
) -> dict[str, float]:
    sockets = [await ChunkRecorder.connect(server.port) for _ in range(options.sockets)]
    empty = place.size() if place is not None else 0
    for number, socket in enumerate(sockets):
        wait = asyncio.ensure_future(socket.until(b'"type":"ok"', 1))
        await asyncio.sleep(0)
        socket.send(
            {"type": "open", "client": "load"},
            {"type": "append", "id": 1, "text": f"{number} {PROMPT}"},
        )
        await wait
    await asyncio.sleep(SAVED_SECONDS)
    generate = {"type": "generate", "id": 2, "max_tokens": options.tokens, "ignore_eos": True}
    before, database = server.snapshot(), place.cpu() if place is not None else 0.0
    begin = time.perf_counter()
    waits = [asyncio.ensure_future(socket.until_done(1)) for socket in sockets]
    await asyncio.sleep(0)
    for socket in sockets:
        socket.send(generate)
    await asyncio.gather(*waits)
    elapsed = time.perf_counter() - begin
    await asyncio.sleep(SAVED_SECONDS)
    total = options.sockets * options.tokens
    after = server.snapshot()
    spent = {part: after["store"].get(part, 0) - before["store"].get(part, 0) for part in PARTS}
    return {
        **{part: seconds / total * 1e6 for part, seconds in spent.items()},
        "server": (after["cpu"] - before["cpu"]) / total * 1e6,
        "database": ((place.cpu() if place is not None else 0.0) - database) / total * 1e6,
        "items": place.saved() / total if place is not None else 0.0,
        "taken": (place.size() - empty) / total if place is not None else 0.0,
        "tokens/s": total / elapsed,
    }


def _measure(kind: str, servers: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    with ExitStack() as stack:
        place: StorePlace | None = None
        settings: dict[str, Any] = {
            "step_ms": options.step_ms,
            "persist": options.persist,
            "store_cost": 1,
        }
        match kind:
            case "file" | "encrypted":
                place = stack.enter_context(_file(kind == "encrypted"))
            case "postgres":
                place = _postgres(servers[kind])
            case "redis":
                place = _redis(servers[kind])
        if place is not None:
            settings["store"] = place.url
            if place.key_file is not None:
                settings["store_key_file"] = str(place.key_file)
        server = stack.enter_context(FakeServer(**settings))
        return asyncio.run(_run(server, place, options))


def _cells(runs: list[dict[str, float]]) -> list[str]:
    """Medians, and from where to where."""
    cells = []
    for name in runs[0]:
        values = [each[name] for each in runs]
        digits = 0 if name == "tokens/s" else 1
        low, high = min(values), max(values)
        cells.append(f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sockets", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="that each one generates")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--persist", choices=["lazy", "sync"], default="lazy")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", help="write all runs to this file")
    options = parser.parse_args()
    from tests.servers import running_postgres, running_redis

    about = machine()
    print(headline(about), flush=True)
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in options.only}
    with ExitStack() as stack:
        servers: dict[str, Any] = {}
        for kind, running in (("postgres", running_postgres), ("redis", running_redis)):
            if kind in runs:
                servers[kind] = stack.enter_context(running())
                if servers[kind] is None:
                    print(f"{kind}: this machine has no server")
                    del runs[kind]
        for number in range(options.rounds):
            for kind, found in runs.items():
                found.append(_measure(kind, servers, options))
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}", flush=True)
    rows = [[kind, *_cells(found)] for kind, found in runs.items()]
    print(table(COLUMNS, rows))
    write_json(options.json, about, runs)


if __name__ == "__main__":
    main()
