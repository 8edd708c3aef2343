"""Hundreds of sockets for minutes: slow readers, abrupt drops, resumes. Does anything grow or stick?

    python benchmarks/soak.py [--minutes 3] [--sockets 500] [--step-ms 20] [--seed 0] [--json FILE]

Each socket plays rounds against a server in a process of its own (fake executor): append, generate,
sometimes on four forks at once, and now and then it reads slowly, stops reading for seconds, drops
the connection in mid-stream and resumes, drops it and never comes back, or closes and starts anew.

Checked for every generation, across any number of drops: each delta continues exactly where the one
before it ended, with as many token ids as positions, and `done` agrees with what was received.
A round that gets no reply for 60 s is a stuck session. Once a second the server's memory, tasks,
descriptors and its event loop's lag (a timer every 10 ms; asyncio rounds timers up to 1 ms) are
sampled. The first half is warm-up (the KV pool fills, sessions reach their usual length); memory must
not grow by more than 5% after it. At the end all clients leave, and nothing may be left: no session, no
socket, no referenced page, no task, no descriptor. `blocks` are those of Python's allocator: unlike
the process' size they fall when objects go, so a leak shows in them.

The exit code is 1 if anything of this fails.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fake_server import FakeServer
from load import upgrade_request
from report import headline, machine, percentile, table, write_json

from ramify.clients.bench.websocket import CLOSE, PING, PONG, TEXT, FrameReader, client_frame

TTL_S = 5.0  # of sessions whose client never comes back
PATIENCE_S = 60.0
LONGEST = 800  # tokens of a session that then starts anew: lengths settle within half a minute
MEMORY_GROWTH = 0.05  # of the memory after warm-up, at most
LAG_P99_S = 0.1
BRANCHES = ("main", "a", "b", "c", "d")
_decode = msgspec.json.Decoder().decode


class Lost(Exception):
    """The connection is gone: resume."""


class Wrong(Exception):
    """The server broke the protocol, or forgot a session."""


@dataclass
class Tally:
    """What all sockets did together."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Socket(asyncio.Protocol):
    """One WebSocket; messages wait in `inbox`, bounded by `pause`."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._head = b""
        self._frames: FrameReader | None = None
        self.transport: asyncio.Transport

    @classmethod
    async def connect(cls, port: int) -> "Socket":
        _, self = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        self.transport.write(upgrade_request(port))
        return self

    def send(self, messages: list[dict[str, Any]]) -> None:
        self.transport.write(client_frame(msgspec.json.encode(messages)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._frames is None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 101"):
                self.transport.abort()
                return
            self._frames = FrameReader()
        for opcode, payload in self._frames.feed(data):
            if opcode == TEXT:
                frame = _decode(payload)
                for message in frame if isinstance(frame, list) else [frame]:
                    self.inbox.put_nowait(message)
            elif opcode == PING:
                self.transport.write(client_frame(payload, PONG))
            elif opcode == CLOSE:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.inbox.put_nowait(None)


class Client:
    """A client that plays rounds until told to stop. Its state outlives its sockets."""

    def __init__(self, port: int, index: int, seed: int, tally: Tally) -> None:
        self._port = port
        self._name = f"soak-{index}"
        self._random = random.Random(seed << 20 | index)
        self._tally = tally
        self._socket: Socket | None = None
        self._forget()

    def _forget(self) -> None:
        """As if it had never had a session."""
        self._login: dict[str, Any] = {}
        self._position: dict[str, int] = {}
        self._revision = 0
        self._op = 0
        self._waiting: dict[tuple[int, str], dict[str, Any]] = {}  # ops without their reply
        self._unseen: dict[str, int | None] = {}  # appends without `ok`: where output started

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`; then close politely. Whatever goes wrong is noted in the tally."""
        try:
            while not stop.is_set():
                await self._round()
            if self._socket is not None:
                self._close()
        except (Wrong, TimeoutError) as error:
            kind = "stuck" if isinstance(error, TimeoutError) else "wrong"
            self._tally.counts[kind] += 1
            waiting = list(self._waiting)
            self._tally.failures.append(f"{self._name}: {kind}: {error!r}; waiting for {waiting}")
            if self._socket is not None:
                self._socket.transport.abort()

    # --- a round -------------------------------------------------------------------------------

    async def _round(self) -> None:
        choose = self._random
        if self._socket is None:
            await self._open()
        kind = choose.choices(
            ["plain", "fork", "slow", "deaf", "drop", "vanish", "anew"], [40, 10, 15, 8, 17, 5, 5]
        )[0]
        if max(self._position.values(), default=0) > LONGEST:
            kind = "anew"
        self._tally.counts[kind] += 1
        if kind == "anew":
            self._close()
            return
        self._ask(fork=kind == "fork")
        if kind == "vanish":
            await self._read(choose.randrange(20))
            self._abort()
            self._forget()
        elif kind == "drop":
            for _ in range(choose.randint(1, 3)):
                await self._read(choose.randrange(30))
                self._abort()
                await asyncio.sleep(choose.random() * 0.5)
                await self._open()
            await self._finish()
        elif kind == "deaf":
            await self._read(choose.randrange(5))
            await self._pause(choose.uniform(1.0, 4.0))
            await self._finish()
        elif kind == "slow":
            while self._waiting:
                await self._pause(0.1)
                await self._read(20)
        else:
            await self._finish()

    def _ask(self, *, fork: bool) -> None:
        """Send one frame of work."""
        text = " ".join("".join(self._random.choices("abcdefgh", k=4)) for _ in range(8))
        ops: list[dict[str, Any]] = []
        on: str | list[str] = "main"
        if fork:
            on = list(BRANCHES[1:])
            ops.append({"type": "fork", "as": on})
        ops.append({"type": "append", "branch": on, "text": text})
        ops.append(
            {
                "type": "generate",
                "branch": on,
                "max_tokens": self._random.randint(8, 120),
                "ignore_eos": True,
                "seed": self._random.randrange(1 << 30),
            }
        )
        if fork:
            ops.append({"type": "drop", "branch": on})
        for op in ops:
            self._op += 1
            op["id"] = self._op
            targets = [op.get("branch", "main")] if op["type"] == "fork" else op["branch"]
            for name in [targets] if isinstance(targets, str) else targets:
                self._waiting[self._op, name] = op
                if op["type"] == "append":
                    self._unseen[name] = None
        self._send(ops)

    def _send(self, ops: list[dict[str, Any]]) -> None:
        if self._socket is None:
            raise Wrong("no socket")
        self._socket.send(ops)

    async def _finish(self) -> None:
        while self._waiting:
            await self._read(1)

    async def _pause(self, seconds: float) -> None:
        """Read nothing for a while."""
        transport = self._socket.transport if self._socket is not None else None
        if transport is None or transport.is_closing():
            return
        transport.pause_reading()
        await asyncio.sleep(seconds)
        if not transport.is_closing():
            transport.resume_reading()

    # --- the connection --------------------------------------------------------------------------

    async def _open(self) -> None:
        self._socket = await Socket.connect(self._port)
        opened: dict[str, Any] = {"type": "open", "client": self._name, "tokens": True, **self._login}
        if self._login:
            opened |= {"have": self._position, "revision": self._revision}
            self._tally.counts["resumed"] += 1
        again = {op["id"]: op for op in self._waiting.values()}
        self._send([opened, *(again[i] for i in sorted(again))])
        while True:
            message = await self._next()
            if message["type"] == "state":
                break
            raise Wrong(f"no state: {message}")
        if not self._login:
            self._login = {"session": message["session"], "key": message["key"]}
            self._position = {"main": 0}
        self._revision = message["revision"]

    def _abort(self) -> None:
        if self._socket is not None:
            self._socket.transport.abort()
            self._socket = None

    def _close(self) -> None:
        """End the session."""
        self._op += 1
        self._send([{"type": "close", "id": self._op}])
        if self._socket is not None:
            self._socket.transport.close()
            self._socket = None
        self._forget()

    async def _next(self) -> dict[str, Any]:
        assert self._socket is not None
        async with asyncio.timeout(PATIENCE_S):
            message = await self._socket.inbox.get()
        if message is None:
            raise Lost
        return message

    async def _read(self, count: int) -> None:
        """Take in so many messages, or fewer if no reply is awaited. Resumes if the server cuts."""
        for _ in range(count):
            if not self._waiting:
                return
            try:
                self._take(await self._next())
            except Lost:
                self._tally.counts["cut off"] += 1
                self._socket = None
                await self._open()

    # --- checks ----------------------------------------------------------------------------------

    def _take(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "delta":
                self._delta(message)
            case "ok" | "done":
                self._reply(message)
            case "error" | "bye" as kind:
                raise Wrong(f"{kind}: {message}")
            case _:
                pass

    def _delta(self, delta: dict[str, Any]) -> None:
        name, position, tokens = delta["branch"], delta["position"], delta["tokens"]
        before = self._position.get(name)
        if before is not None and name in self._unseen and before < position - len(tokens):
            # Resumed before the append's `ok` was seen: it will say that the output starts here.
            before = self._unseen[name] = position - len(tokens)
        if "truncate" in delta or before is None or before + len(tokens) != position:
            raise Wrong(f"a delta does not continue at {before}: {delta}")
        if len(delta["text"]) != 4 * len(tokens):
            raise Wrong(f"text and tokens do not fit: {delta}")
        self._position[name] = position
        self._tally.counts["tokens"] += len(tokens)

    def _reply(self, reply: dict[str, Any]) -> None:
        self._revision = max(self._revision, reply.get("revision", 0))
        name = reply.get("branch", "main")
        op = self._waiting.pop((reply["id"], name), None)
        if op is None:
            return  # sent again after a resume, and answered before
        kind = op["type"]
        if kind == "append":
            start = self._unseen.pop(name)
            if start is not None and start != reply["position"]:
                raise Wrong(f"output was shown from {start} on: {reply}")
            self._position[name] = max(self._position[name], reply["position"])
        elif kind == "fork":
            self._position.update(dict.fromkeys(op["as"], self._position["main"]))
        elif kind == "drop":
            self._position.pop(name, None)
        elif kind == "generate":
            self._tally.counts["generations"] += 1
            if reply["reason"] != "length" or reply["usage"]["output"] != op["max_tokens"]:
                raise Wrong(f"a generation ended early: {reply}")
            if reply["position"] != self._position[name]:
                raise Wrong(f"received up to {self._position[name]}: {reply}")


# --- the measurement ------------------------------------------------------------------------------


@dataclass
class Sample:
    """The server at one moment."""

    at: float
    rss: int
    blocks: int
    sessions: int
    sockets: int
    tasks: int
    fds: int
    cpu: float
    lag: list[float]


def _sample(server: FakeServer, begin: float) -> Sample:
    now = server.snapshot()
    return Sample(
        at=time.perf_counter() - begin,
        **{
            name: now[name]
            for name in ("rss", "blocks", "sessions", "sockets", "tasks", "fds", "cpu", "lag")
        },
    )


async def soak(server: FakeServer, options: argparse.Namespace, tally: Tally) -> list[Sample]:
    """Run all clients for the given time, one sample a second, then let everybody leave."""
    stop = asyncio.Event()
    begin = time.perf_counter()
    clients = [Client(server.port, i, options.seed, tally) for i in range(options.sockets)]
    tasks = []
    for client in clients:
        tasks.append(asyncio.create_task(client.run(stop)))
        await asyncio.sleep(2.0 / options.sockets)
    samples: list[Sample] = []
    while (elapsed := time.perf_counter() - begin) < options.minutes * 60:
        samples.append(await asyncio.to_thread(_sample, server, begin))
        if len(samples) % 10 == 0:
            print(_line(samples[-1], tally), flush=True)
        await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - begin - elapsed)))
    stop.set()
    await asyncio.gather(*tasks)
    return samples


async def quiet(server: FakeServer, empty: dict[str, Any]) -> dict[str, Any]:
    """The server's state once it is empty again, or after the patience is over."""
    deadline = time.perf_counter() + TTL_S + PATIENCE_S
    while True:
        state = await asyncio.to_thread(server.snapshot)
        left = {k: state[k] for k in ("sessions", "sockets", "running")}
        if not any(left.values()) and state["tasks"] <= empty["tasks"]:
            break
        if time.perf_counter() > deadline:
            break
        await asyncio.sleep(0.5)
    return await asyncio.to_thread(server.snapshot, collect=True)


def _line(s: Sample, tally: Tally) -> str:
    return (
        f"{s.at:6.0f} s  {s.rss / 2**20:7.1f} MiB  sessions {s.sessions:4}  sockets {s.sockets:4}  "
        f"tasks {s.tasks:4}  lag p99 {percentile(s.lag, 99) * 1e3:6.1f} ms  "
        f"generations {tally.counts['generations']:6}  failures {len(tally.failures)}"
    )


def judge(
    samples: list[Sample], empty: dict[str, Any], end: dict[str, Any], tally: Tally
) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what is wrong with them."""
    warm = samples[len(samples) // 2 :]
    fifth = max(1, len(warm) // 5)
    early = percentile([s.rss for s in warm[:fifth]], 50)
    late = percentile([s.rss for s in warm[-fifth:]], 50)
    lag = [lag for s in warm for lag in s.lag]
    figures = {
        "rss_empty_mib": empty["rss"] / 2**20,
        "rss_after_warm_up_mib": early / 2**20,
        "rss_at_the_end_mib": late / 2**20,
        "rss_when_all_left_mib": end["rss"] / 2**20,
        "blocks_empty": empty["blocks"],
        "blocks_after_warm_up": int(percentile([s.blocks for s in warm[:fifth]], 50)),
        "blocks_at_the_end": int(percentile([s.blocks for s in warm[-fifth:]], 50)),
        "blocks_when_all_left": end["blocks"],
        "lag_ms": {f"p{p:g}": percentile(lag, p) * 1e3 for p in (50, 90, 99, 99.9, 100)},
        "cpu_us_per_token": (samples[-1].cpu - samples[0].cpu) / max(1, tally.counts["tokens"]) * 1e6,
        "counts": dict(tally.counts),
    }
    wrong = list(tally.failures)
    if late > early * (1 + MEMORY_GROWTH):
        wrong.append(f"memory grew from {early / 2**20:.1f} to {late / 2**20:.1f} MiB")
    if percentile(lag, 99) > LAG_P99_S:
        wrong.append(f"the p99 of the loop's lag is {percentile(lag, 99) * 1e3:.1f} ms")
    for name in ("sessions", "sockets", "running"):
        if end[name]:
            wrong.append(f"{name} left at the end: {end[name]}")
    for name in ("tasks", "fds"):
        if end[name] > empty[name]:
            wrong.append(f"{name}: {empty[name]} before, {end[name]} at the end")
    if end["kv"][2]:
        wrong.append(f"{end['kv'][2]} pages are still referenced")
    return figures, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--sockets", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--gateways", type=int, default=0, help="processes")
    parser.add_argument("--json", help="write samples and figures to this file")
    options = parser.parse_args()
    about = machine()
    print(headline(about), flush=True)
    tally = Tally()
    with FakeServer(
        step_ms=options.step_ms, ttl=TTL_S, lag=1, loop=options.loop, gateways=options.gateways
    ) as server:
        empty = server.snapshot(collect=True)
        samples = asyncio.run(soak(server, options, tally))
        end = asyncio.run(quiet(server, empty))
    figures, wrong = judge(samples, empty, end, tally)
    rows = [
        [name, f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"]
        for name, value in figures.items()
        if isinstance(value, float | int)
    ]
    rows += [[f"lag {name} ms", f"{value:.1f}"] for name, value in figures["lag_ms"].items()]
    rows += [[name, str(count)] for name, count in sorted(tally.counts.items())]
    print(table(["", ""], rows))
    for line in wrong[:20]:
        print("WRONG:", line)
    curve = [
        {"at": s.at, "rss": s.rss, "blocks": s.blocks, "sessions": s.sessions, "tasks": s.tasks}
        for s in samples
    ]
    write_json(options.json, about, {"figures": figures, "wrong": wrong, "curve": curve})
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
