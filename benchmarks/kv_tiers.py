"""What host memory and a disk do for sessions whose KV does not fit: under pressure, and over a restart.

python benchmarks/kv_tiers.py pressure [--hot 50] [--cold 25] [--tokens 2000] [--part 0.1] [--slower 4]
python benchmarks/kv_tiers.py restart [--sessions 100] [--tokens 1024] [--disk-gbs 1,3.4,10 --slower 1]

pressure   hot sessions take a turn each second, cold ones with twice as many tokens each five,
           in a pool of a part of what they hold. Before and behind that those of the hot
           ones that fit are alone. What is found in which tier, waits, whether each turn ends with the
           right tokens, and how long it takes until first tokens come as soon as before. The
           executor is a fake at an H200's speeds with Llama-8B; it and all pauses are so many times
           slower. A turn forks the session's history, which stays as it is
restart    sessions of the bundled model on this CPU, in a pool of two prompts, one after the other:
           first tokens where KV is computed, comes from host memory, and, after the server began
           anew, from a disk and from a folder on a tmpfs (a hot restart). `--disk-gbs`: the fake
           of `pressure`, and disks that read so many GB/s
"""

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_server import BUNDLED
from report import headline, machine, percentile, table, write_json
from websockets.asyncio.client import ClientConnection, connect

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FactorySpec
from ramify.actors.kit.log import configure
from ramify.actors.tiers.disk_file import DiskFile
from ramify.actors.tiers.mover import READERS
from ramify.gpu.executors.fake_model import FakeModel
from ramify.gpu.kv.host_memory import Bytes
from ramify.protocol.config import (
    EngineConfig,
    LogConfig,
    ModelConfig,
    ScheduleConfig,
    ServerConfig,
)

STEP_MS, PROMPT_US, BLOCK_MS = 8.0, 24.0, 0.17  # of a decode step, a prompt's token, a block of 8 MiB
BLOCK_BYTES = 8 << 20
OUTPUT, NEW = 8, 16  # tokens of an answer, and of what comes before it
ALONE_S, BEHIND_S, WINDOW_S = 10.0, 20.0, 3.0
HOT_S, COLD_S = 1.0, 5.0  # the mean of a pause between two turns, times `--slower`
PATIENCE_S = 300.0  # a turn that takes longer hangs
AS_BEFORE = 1.5  # times the first tokens before the pressure: speed is back
TIERS = ("device", "host", "disk", "peer")
MODEL = FakeModel(eos_every=0)
PARENTS: dict[str, str | None] = {"disk": None}  # of folders, by what they lie on
if Path("/dev/shm").is_dir():
    PARENTS["tmpfs"] = "/dev/shm"


class Session:
    """One branch with a history, of which each turn makes a fork."""

    def __init__(self, socket: ClientConnection, history: list[int], dice: random.Random) -> None:
        self._socket, self.history, self._dice = socket, history, dice
        self._count = 0
        self.turns: list[tuple[float, float]] = []  # when sent, and seconds until the first token
        self.wrong = 0

    @classmethod
    async def open(cls, port: int, history: list[int], dice: random.Random) -> "Session":
        socket = await connect(f"ws://127.0.0.1:{port}/v1/ws", max_size=None, ping_interval=None)
        session = cls(socket, history, dice)
        await session._send(
            {"type": "open", "client": "tiers", "ttl_s": 0, "tokens": True},
            {"type": "append", "id": 1, "tokens": history},
        )
        return session

    async def _send(self, *ops: dict[str, Any]) -> None:
        await self._socket.send(json.dumps(ops))

    async def turn(self, *, check: bool = False) -> dict[str, Any]:
        """The usage of one turn. `check`: its tokens are those of the fake model."""
        self._count += 1
        name, ident = f"turn{self._count}", 10 * self._count
        new = [self._dice.randrange(10, 900) for _ in range(NEW)]
        sampling = {"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True}
        sent = time.perf_counter()
        await self._send(
            {"type": "fork", "id": ident, "branch": "main", "as": [name]},
            {"type": "append", "id": ident + 1, "branch": name, "tokens": new},
            {"type": "generate", "id": ident + 2, "branch": name, **sampling},
        )
        heard: list[int] = []
        while True:
            found = json.loads(await self._socket.recv())
            for event in found if isinstance(found, list) else [found]:
                if event["type"] == "error":
                    raise RuntimeError(str(event))
                if event["type"] == "delta":
                    if not heard:
                        self.turns.append((sent, time.perf_counter() - sent))
                    heard += event["tokens"]
                if event["type"] == "done":
                    if check:
                        self.wrong += heard != MODEL.expected(self.history + new, OUTPUT)
                    await self._send({"type": "drop", "id": ident + 3, "branch": name})
                    usage: dict[str, Any] = event["usage"]
                    return usage

    async def keep_on(self, pause: float, until: float) -> None:
        """Take turns until then."""
        while time.perf_counter() < until:
            await asyncio.wait_for(self.turn(check=True), PATIENCE_S)
            left = max(0.0, until - time.perf_counter())
            await asyncio.sleep(min(left, self._dice.expovariate(1 / pause)))


# --- pressure -------------------------------------------------------------------------------------


async def pressed(options: argparse.Namespace, host: float, disk: bool) -> dict[str, Any]:
    """One run. `host`: host memory, in parts of what all sessions hold."""
    held = options.hot * options.tokens + options.cold * 2 * options.tokens
    slow, dice = options.slower, random.Random(options.seed)
    settings = {
        "model": {"eos_every": 0}, "verify": False, "context": 4 * options.tokens,
        "pages": int(options.part * held), "host_blocks": int(host * held / 64),
        "step_seconds": STEP_MS * slow / 1e3, "prompt_us": PROMPT_US * slow,
        "block_seconds": BLOCK_MS * slow / 1e3,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        behind = {"kv_disk": Path(folder), "kv_disk_bytes": 1 << 30} if disk else {}
        model = ModelConfig(path=BUNDLED, kv_host=1 if host else 0, **behind)  # type: ignore[arg-type]
        config = EngineConfig(model=model, server=ServerConfig(port=0))
        spec = FactorySpec("fake_server:bench_executor", settings)
        async with running_engine(config, spec=spec) as engine:
            assert engine.cache is not None

            def prompt(tokens: int) -> list[int]:
                return [dice.randrange(10, 900) for _ in range(tokens)]

            sizes = [options.tokens] * options.hot + [2 * options.tokens] * options.cold
            every = [await Session.open(engine.port, prompt(size), dice) for size in sizes]
            hot, cold = every[: options.hot], every[options.hot :]
            few = hot[: max(1, int(0.7 * options.part * held / options.tokens))]

            async def alone(seconds: float) -> float:
                begin = time.perf_counter()
                await asyncio.gather(*(each.keep_on(0.5, begin + seconds) for each in few))
                return begin

            for each in every:
                await each.turn(check=True)
            await alone(1.0)  # what evicted their KV is gone
            begin = await alone(ALONE_S)
            before = waits_of(few, begin + ALONE_S / 2, begin + ALONE_S)
            counts = tiers(engine.cache)
            begin, computed = time.perf_counter(), engine.metrics._computed
            until = begin + options.seconds
            tasks = [each.keep_on(HOT_S * slow, until) for each in hot]
            await asyncio.gather(*tasks, *(each.keep_on(COLD_S * slow, until) for each in cold))
            over = time.perf_counter()
            found = {name: tiers(engine.cache)[name] - counts[name] for name in TIERS}
            waits = waits_of(every, begin, until)
            asked = sum(len(each.history) for each in every for at, _ in each.turns if begin <= at)
            computed = engine.metrics._computed - computed
            behind_it = await alone(BEHIND_S)
    return {
        "turns_s": len(waits) / options.seconds,
        "ttft_p50_ms": percentile(waits, 50) * 1e3,
        "ttft_p95_ms": percentile(waits, 95) * 1e3,
        "ttft_max_ms": max(waits) * 1e3,
        "last_turn_s": over - until,
        **{f"hit_{name}": found[name] / asked for name in TIERS[:3]},
        "before_p90_ms": percentile(before, 90) * 1e3,
        "back_after_s": back_after(few, behind_it, percentile(before, 90)),
        "computed": computed,
        "wrong": sum(each.wrong for each in every),
    }


def tiers(cache: Any) -> dict[str, int]:
    """Tokens that requests found so far."""
    return {tier.tier: tier.hit_tokens for tier in cache.tiers(1)}


def waits_of(sessions: list[Session], begin: float, end: float) -> list[float]:
    """Of the turns that were sent then."""
    return [wait for each in sessions for at, wait in each.turns if begin <= at < end]


def back_after(sessions: list[Session], begin: float, before: float) -> float:
    """Seconds from `begin` on after which the p90 of each window is as `before`; inf: it never is.

    A wait is one step or two, between which the median of a window flips.
    """
    at, since = begin + BEHIND_S - WINDOW_S, float("inf")
    while at >= begin:
        waits = waits_of(sessions, at, at + WINDOW_S)
        if waits and percentile(waits, 90) > AS_BEFORE * before:
            break
        since, at = at - begin, at - 0.25
    return since


async def pressure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """See the module's top."""
    cases: list[tuple[str, float, bool]] = [
        ("no host memory", 0.0, False),
        ("for all", 1.2, False),
        ("for a quarter", 0.25, False),
        ("a quarter, and a disk", 0.25, True),
    ]
    found = {}
    for name, host, disk in cases:
        found[name] = await pressed(options, host, disk)
        print(name, {key: round(value, 2) for key, value in found[name].items()}, flush=True)
    return found


# --- restart --------------------------------------------------------------------------------------


async def asked(
    options: argparse.Namespace, host: int, disk: Path | None, rounds: int
) -> list[list[tuple[float, dict[str, Any]]]]:
    """First tokens and usages of each session, in so many rounds at one server."""
    behind = {} if disk is None else {"kv_disk": disk, "kv_disk_bytes": 4 << 30}
    spec, slow, schedule = None, options.slower, ScheduleConfig()
    if options.disk_gbs:
        schedule = ScheduleConfig(itl_target_ms=schedule.itl_target_ms * slow)
        settings = {
            "model": {"eos_every": 0}, "verify": False, "context": 2 * options.tokens,
            "pages": 2 * options.tokens, "host_blocks": host // BLOCK_BYTES,
            "step_seconds": STEP_MS * slow / 1e3, "prompt_us": PROMPT_US * slow,
            "block_seconds": BLOCK_MS * slow / 1e3,
        }  # fmt: skip
        spec = FactorySpec("fake_server:bench_executor", settings)
    model = ModelConfig(
        path=BUNDLED, context=2 * options.tokens + 2048, max_rows=4, step_tokens=512, kv_host=host,
        kv_tokens=2 * options.tokens, **behind,  # type: ignore[arg-type]
    )  # fmt: skip
    dice = random.Random(options.seed)
    config = EngineConfig(model=model, server=ServerConfig(port=0), schedule=schedule)
    result = []
    async with running_engine(config, spec=spec) as engine:
        prompts = [
            [dice.randrange(10, 900) for _ in range(options.tokens)] for _ in range(options.sessions)
        ]
        for _ in range(rounds):
            waits = []
            for prompt in prompts:
                session = await Session.open(engine.port, prompt, dice)
                usage = await session.turn()
                waits.append((session.turns[0][1], usage))
                await session._socket.close()
            result.append(waits)
        if disk is not None:
            await asyncio.sleep(options.settle)  # what is to be written is
    return result


@contextmanager
def slow_disk(gbs: float, slower: float) -> Iterator[None]:
    """Each block takes as long to be read as one of 8 MiB does, with others beside it."""
    read, seconds = DiskFile.read, READERS * BLOCK_BYTES / gbs * 1e-9 * slower

    def slowed(self: DiskFile, place: int, key: bytes, block: Bytes) -> int | None:
        time.sleep(seconds)
        return read(self, place, key, block)

    DiskFile.read = slowed  # type: ignore[method-assign]
    try:
        yield
    finally:
        DiskFile.read = read  # type: ignore[method-assign]


async def restart(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """See the module's top."""
    found: dict[str, dict[str, Any]] = {}

    def note(name: str, waits: list[tuple[float, dict[str, Any]]]) -> None:
        times = [wait for wait, _ in waits]
        found[name] = {
            "ttft_p50_ms": percentile(times, 50) * 1e3,
            "ttft_p90_ms": percentile(times, 90) * 1e3,
            "cached": sum(usage["cached"] for _, usage in waits),
            "prompt": sum(usage["prompt"] for _, usage in waits),
        }
        print(name, {key: round(value) for key, value in found[name].items()}, flush=True)

    if options.disk_gbs:
        host = int(1.2 * options.sessions * options.tokens / 64) * BLOCK_BYTES
        with tempfile.TemporaryDirectory() as name:
            computed, loaded = await asked(options, host, Path(name), 2)
            note("computed", computed)
            note("host memory", loaded)
            for gbs in options.disk_gbs:
                with slow_disk(gbs, options.slower):
                    (waits,) = await asked(options, host // 4, Path(name), 1)
                note(f"restart, {gbs} GB/s", waits)
        return found
    for name, parent in PARENTS.items():
        folder = Path(tempfile.mkdtemp(dir=parent))
        try:
            if parent is None:
                computed, host = await asked(options, options.host, folder, 2)
                note("computed", computed)
                note("host memory", host)
            else:
                await asked(options, options.host, folder, 1)
            (waits,) = await asked(options, options.host // 4, folder, 1)
            note(f"restart, {name}", waits)
        finally:
            shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["pressure", "restart"])
    parser.add_argument("--hot", type=int, default=50)
    parser.add_argument("--cold", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=0, help="of a session")
    parser.add_argument("--part", type=float, default=0.1, help="of what they hold is the pool")
    parser.add_argument("--seconds", type=float, default=30.0, help="of pressure")
    parser.add_argument("--slower", type=float, default=4.0)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--host", type=int, default=2 << 30, help="bytes, of restart")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds before a server stops")
    parser.add_argument("--disk-gbs", type=lambda text: [float(each) for each in text.split(",")])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    options.tokens = options.tokens or (2000 if options.what == "pressure" else 1024)
    configure(LogConfig(level="warning"))
    what: Callable[[argparse.Namespace], Any] = {"pressure": pressure, "restart": restart}[options.what]
    runs: dict[str, dict[str, Any]] = asyncio.run(what(options))
    about = machine()
    print(headline(about))
    columns = list(next(iter(runs.values())))
    rows = [[name, *(f"{run[key]:.2f}" for key in columns)] for name, run in runs.items()]
    print(table(["", *columns], rows))
    write_json(options.json, about, runs)


if __name__ == "__main__":
    main()
