"""What saved sessions cost and give: chats that return after a restart, a full store, what saving takes.

    python benchmarks/saved_sessions.py [--parts returning full cost] [--chats 50] [--tokens 500]
        [--sessions 1000] [--length 2000] [--rounds 3] [--streams 64] [--json FILE]

returning   `ramify serve` with the bundled model on this CPU. --chats chats of --tokens tokens are
            saved, the server stops, and another one starts on a copy of the store: with no warm start
            ("cold"), with one that has ended ("warm"), and with one that has just begun ("warming"),
            in turns. The chats return in random order, one every --gap seconds. Time to first token as
            the client sees it, from the frame with the message to the first delta.
full        the fake executor and --sessions sessions of --length tokens: the size of the file, the time
            from the start of the process to the first `state`, and its memory, before and after all of
            them were opened; the same with an empty store.
cost        the fake executor and --streams streams, with and without a store in turns: tokens a second,
            CPU time of the process for each token, and the part of it that saver, recorder and the
            store's thread have by their own clocks (`time.thread_time`).
"""

import argparse
import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
from fake_server import FakeServer
from report import headline, machine, percentile, table, write_json
from websockets.asyncio.client import ClientConnection, connect

WORDS = [
    "the",
    "river",
    "stone",
    "walks",
    "light",
    "quiet",
    "morning",
    "small",
    "bird",
    "sings",
    "we",
    "wait",
]
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


async def ask(socket: ClientConnection, ops: list[dict[str, Any]], last: int) -> float:
    """Send a frame and read to the end of op `last`. Seconds to the first delta (0: none came)."""
    begun, first = time.perf_counter(), 0.0
    await socket.send(_encode(ops).decode())
    while True:
        frame = _decode(await socket.recv())
        for message in frame if isinstance(frame, list) else [frame]:
            if message["type"] == "delta" and not first:
                first = time.perf_counter() - begun
            if message["type"] == "error":
                raise RuntimeError(str(message))
            if message.get("id") == last and message["type"] in ("ok", "done"):
                return first


async def opened(url: str, **fields: Any) -> tuple[ClientConnection, dict[str, Any]]:
    """A socket with its `state`."""
    socket = await connect(url, max_size=None, open_timeout=60)
    await socket.send(_encode({"type": "open", "client": "c", **fields}).decode())
    frame = _decode(await socket.recv())
    state = frame[0] if isinstance(frame, list) else frame
    if state["type"] != "state":
        raise RuntimeError(str(state))
    return socket, state


# --- returning ------------------------------------------------------------------------------------


@contextmanager
def served(store: Path, warm: str) -> Iterator[str]:
    """`ramify serve` on a free port; its WebSocket's URL."""
    flags = ["--port=0", "--log-level=warning", f"--store={store}", f"--warm-start={warm}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ramify.clients.cli", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith("ready: "))
        yield next(lines).removeprefix("ready: ").strip()
    finally:
        process.terminate()
        process.wait(60)


def metric(url: str, name: str) -> float:
    """One of the server's metrics, all its labels together."""
    with urlopen(url.replace("ws://", "http://").replace("/v1/ws", "/metrics")) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def fill(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Chats that are there to return; what opens them."""
    dice, logins = random.Random(1), []
    for _ in range(options.chats):
        socket, state = await opened(url)
        text = " ".join(dice.choices(WORDS, k=options.tokens))
        messages = [{"role": "user", "content": text}]
        generate = {"type": "generate", "id": 2, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        await ask(socket, [{"type": "append", "id": 1, "messages": messages}, generate], 2)
        logins.append({"session": state["session"], "key": state["key"]})
        await socket.close()
    return logins


async def come_back(url: str, logins: list[dict[str, Any]], gap: float) -> list[float]:
    """Seconds to the first token of each chat's next turn."""

    async def one(login: dict[str, Any], after: float) -> float:
        await asyncio.sleep(after)
        socket, _ = await opened(url, **login)
        messages = [{"role": "user", "content": "And then?"}]
        generate = {"type": "generate", "id": 4, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        first = await ask(socket, [{"type": "append", "id": 3, "messages": messages}, generate], 4)
        await socket.close()
        return first

    dice = random.Random(2)
    order = dice.sample(logins, len(logins))
    return await asyncio.gather(*(one(login, i * gap) for i, login in enumerate(order)))


def returning(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row for each way to start."""
    store = folder / "chats.db"
    with served(store, "none") as url:
        logins = asyncio.run(fill(url, options))
    times: dict[str, list[float]] = {"cold": [], "warm": [], "warming": []}
    notes: dict[str, str] = {}
    for _ in range(options.rounds):
        for way, found in times.items():
            copy = folder / f"{way}.db"
            for path in folder.glob("chats.db*"):
                shutil.copy(path, str(path).replace("chats.db", copy.name))
            with served(copy, "none" if way == "cold" else "auto") as url:
                if way == "warm":
                    begun = time.perf_counter()
                    while metric(url, "ramify_warm_start_sessions_total") < options.chats:
                        if time.perf_counter() - begun > 300:
                            raise RuntimeError("the warm start does not end")
                        time.sleep(0.2)
                    notes[way] = f"{time.perf_counter() - begun:.1f} s to compute"
                found += asyncio.run(come_back(url, logins, options.gap))
            for path in folder.glob(f"{copy.name}*"):
                path.unlink()
    rows = []
    for way, found in times.items():
        ms = {f"p{p}": round(1e3 * percentile(found, p), 1) for p in (50, 90, 99)}
        rows.append({"start": way, **ms, "note": notes.get(way, "")})
    return rows


# --- full -----------------------------------------------------------------------------------------


async def fill_fake(port: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    dice, logins = random.Random(3), []
    for _ in range(options.sessions):
        socket, state = await opened(f"ws://127.0.0.1:{port}/v1/ws")
        tokens = dice.choices(range(300, 900), k=options.length - 8)
        generate = {"type": "generate", "id": 2, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        await ask(socket, [{"type": "append", "id": 1, "tokens": tokens}, generate], 2)
        logins.append({"session": state["session"], "key": state["key"]})
        await socket.close()
    return logins


async def open_all(port: int, logins: list[dict[str, Any]]) -> float:
    """Seconds until all have their `state`, one after the other."""
    begun = time.perf_counter()
    for login in logins:
        socket, state = await opened(f"ws://127.0.0.1:{port}/v1/ws", **login)
        assert state["resumed"]
        await socket.close()
    return time.perf_counter() - begun


def full(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    store, rows = folder / "full.db", []
    with FakeServer(store=str(store), ttl=1.0) as server:
        logins = asyncio.run(fill_fake(server.port, options))
    for name, path in (("empty", folder / "empty.db"), ("full", store)):
        begun = time.perf_counter()
        with FakeServer(store=str(path), warm_start=0) as server:
            socket = asyncio.run(_first(server.port))
            row = {
                "store": name,
                "file MiB": round(
                    sum(p.stat().st_size for p in folder.glob(f"{path.name}*")) / 2**20, 2
                ),
                "first state s": round(socket - begun, 2),
                "RSS MiB": round(server.snapshot(collect=True)["rss"] / 2**20, 1),
            }
            if name == "full":
                seconds = asyncio.run(open_all(server.port, logins))
                row["open all s"] = round(seconds, 2)
                row["RSS then MiB"] = round(server.snapshot(collect=True)["rss"] / 2**20, 1)
            rows.append(row)
    return rows


async def _first(port: int) -> float:
    socket, _ = await opened(f"ws://127.0.0.1:{port}/v1/ws")
    now = time.perf_counter()
    await socket.close()
    return now


# --- cost -----------------------------------------------------------------------------------------


async def streams(port: int, options: argparse.Namespace) -> tuple[float, int]:
    """Seconds and tokens of generations on --streams sessions at once."""
    sockets = [(await opened(f"ws://127.0.0.1:{port}/v1/ws"))[0] for _ in range(options.streams)]
    count = options.output

    def ops(first: int) -> list[dict[str, Any]]:
        generate = {"type": "generate", "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return [
            {"type": "append", "id": first, "text": "once upon a time"},
            {**generate, "id": first + 1},
        ]

    begun = time.perf_counter()
    for turn in range(options.turns):
        await asyncio.gather(*(ask(s, ops(1 + 2 * turn), 2 + 2 * turn) for s in sockets))
    seconds = time.perf_counter() - begun
    for socket in sockets:
        await socket.close()
    return seconds, options.turns * options.streams * count


def _spread(values: list[float], digits: int) -> str:
    """The median and what lies around it."""
    middle, low, high = percentile(values, 50), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def cost(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = {"none": [], "store": []}
    for i in range(2 * options.rounds):
        way = ("none", "store")[(i + i // 2) % 2]  # which is first alternates
        settings: dict[str, Any] = {"step_ms": options.step_ms}
        if way == "store":
            settings |= {"store": str(folder / f"cost{i}.db"), "store_cost": 1}
        with FakeServer(**settings) as server:
            asyncio.run(streams(server.port, options))  # warm up
            before = server.snapshot()
            seconds, tokens = asyncio.run(streams(server.port, options))
            after = server.snapshot()
        row = {"tok/s": tokens / seconds, "us": 1e6 * (after["cpu"] - before["cpu"]) / tokens}
        for part in ("saver", "writer"):
            row[part] = 1e6 * (after["store"].get(part, 0.0) - before["store"].get(part, 0.0)) / tokens
        found[way].append(row)
    rows = []
    for way, each in found.items():
        rows.append(
            {
                "store": way,
                "tok/s": _spread([r["tok/s"] for r in each], 0),
                "CPU us/token": _spread([r["us"] for r in each], 2),
                "saver us/token": _spread([r["saver"] for r in each], 2),
                "store thread us/token": _spread([r["writer"] for r in each], 2),
            }
        )
    return rows


PARTS = {"returning": returning, "full": full, "cost": cost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=500, help="words of a chat, about as many tokens")
    parser.add_argument("--gap", type=float, default=0.2, help="seconds between chats that return")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--length", type=int, default=2000, help="tokens of a session")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output", type=int, default=200, help="tokens of a generation")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    about = machine()
    print(headline(about))
    results: dict[str, Any] = {}
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            rows = results[part] = PARTS[part](options, Path(folder))
        print(f"\n{part}")
        names = list(dict.fromkeys(name for row in rows for name in row))
        print(table(names, [[str(row.get(name, "")) for name in names] for row in rows]), flush=True)
    write_json(options.json, about, results)


if __name__ == "__main__":
    main()
