"""Replicas and saved sessions with a real model on GPUs: gains, kills, restarts.

    python benchmarks/replicas_gpu.py [scale] [kill] [warm] [--shape llama-3.1-8b] [--json FILE]

Random weights of the shape, token ids, `ignore_eos`.

    scale  a server without replicas, some with --replicas (a GPU each), in turns: tokens a second and
           TTFT of --streams sessions at once on each server, and of that many a replica
    kill   greedy generations with deterministic kernels, a replica ended by SIGKILL in their midst,
           again and again: tokens must be those of an undisturbed run. "wait" is the longest between
           two deltas of a stream; "back" is how long the replica takes to be ready again
    warm   --chats sessions of --length tokens are saved and the server stops. They return at once to one
           that has computed nothing ("cold"), and to one whose warm start has ended ("warm")
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from report import headline, machine, percentile, write_json

import ramify
from ramify.clients.bench.server import served

PARTS = ("scale", "kill", "warm")
WAIT_S = 5.0  # that no stream may wait


def told(url: str, path: str) -> str:
    """What the server answers to GET."""
    address = url.replace("ws://", "http://").split("/v1")[0] + path
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


def ready(url: str) -> list[dict[str, Any]]:
    """The replicas that are."""
    known = json.loads(told(url, "/v1/info")).get("replicas", [])
    return [each for each in known if each["state"] == "ready"]


def metric(url: str, name: str) -> float:
    """One of the server's metrics, all its labels together."""
    lines = told(url, "/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=length)


class Outcome(msgspec.Struct):
    """What came of one generation. `first`, `longest`: seconds to the first delta, and between two."""

    tokens: list[int]
    first: float
    longest: float


async def generate(session: Any, count: int) -> Outcome:
    """Greedily, so many tokens."""
    generation = session.main.generate(max_tokens=count, temperature=0.0, ignore_eos=True)
    times = [time.perf_counter()]
    async for _ in generation:
        times.append(time.perf_counter())
    result = await generation
    if result.usage.output != count:
        raise RuntimeError(f"a stream ended early: {result.reason}, {result.usage}")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return Outcome(list(result.tokens or ()), gaps[0], max(gaps))


def clients(url: str, seeds: range, options: argparse.Namespace, barrier: Any, results: Any) -> None:
    """A process with some of the sessions: opens them, and generates when all processes have theirs."""

    async def one(session: Any) -> Outcome:
        outcome = await generate(session, options.tokens)
        await session.close()
        return outcome

    async def all_of_them() -> list[Outcome]:
        sessions = [await ramify.connect(url, tokens=True) for _ in seeds]
        for session, seed in zip(sessions, seeds, strict=True):
            await session.main.append(tokens=prompt(seed, options.prompt))
        await asyncio.to_thread(barrier.wait)
        return await asyncio.gather(*map(one, sessions))

    results.put((seeds.start, msgspec.msgpack.encode(asyncio.run(all_of_them()))))


def together(
    url: str, streams: int, options: argparse.Namespace, meanwhile: Callable[[], None] = lambda: None
) -> tuple[list[Outcome], float]:
    """So many sessions that generate at once, from --clients processes, and how long that took.

    `meanwhile` runs beside them.
    """
    context = multiprocessing.get_context("spawn")
    count = min(options.clients, streams)
    barrier, results = context.Barrier(count + 1), context.Queue()
    parts = [range(streams * i // count, streams * (i + 1) // count) for i in range(count)]
    processes = [
        context.Process(target=clients, args=(url, part, options, barrier, results)) for part in parts
    ]
    for process in processes:
        process.start()
    barrier.wait(120)
    began = time.perf_counter()
    meanwhile()
    found = dict(results.get(timeout=120) for _ in processes)
    took = time.perf_counter() - began
    for process in processes:
        process.join()
    each = [msgspec.msgpack.decode(found[part.start], type=list[Outcome]) for part in parts]
    return list(itertools.chain(*each)), took


def flags(options: argparse.Namespace, *more: str) -> list[str]:
    return [
        "--device",
        options.device,
        "--context",
        "4096",
        "--kv-tokens",
        str(options.kv_tokens),
        *more,
    ]


def scale(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a server and load."""
    rows, count = [], options.replicas
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    ways = {"none": flags(options)}
    for gateways in options.gateways:
        name = f"{count}, {gateways} gateways"
        ways[name] = flags(options, "--replicas", str(count), "--gateways", str(gateways))
    with ExitStack() as stack:
        urls = {way: stack.enter_context(served(own, options.shape)).url for way, own in ways.items()}
        for repeat in range(1 + options.repeats):
            for way, url in urls.items():
                for streams in (options.streams, count * options.streams):
                    found, took = together(url, streams, options)
                    if repeat:  # the first one warms up
                        ttft = statistics.mean(each.first for each in found)
                        one = {"tok/s": streams * options.tokens / took, "TTFT ms": 1e3 * ttft}
                        runs.setdefault((way, streams), []).append(one)
    for (way, streams), each in runs.items():
        row: dict[str, Any] = {"replicas": way, "streams": streams}
        for name in ("tok/s", "TTFT ms"):
            values = [one[name] for one in each]
            row[name] = f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"
        print(row, flush=True)
        rows.append(row)
    return rows


def kill(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a kill."""
    rows = []
    chance = random.Random(0)
    count = options.replicas
    same = ["--deterministic"] if options.device == "cuda" else []  # else texts may differ by chance
    with served(flags(options, "--replicas", str(count), *same), options.shape) as server:
        while len(ready(server.url)) < count:
            time.sleep(0.1)
        together(server.url, options.streams, options)
        plain, took = together(server.url, options.streams, options)
        print(
            f"undisturbed: {took:.2f} s, longest wait {max(s.longest for s in plain):.2f} s", flush=True
        )
        for number in range(options.kills):
            victim: dict[str, Any] = {}

            def killing(victim: dict[str, Any] = victim) -> None:
                time.sleep(chance.uniform(0.2, 0.7) * took)
                victim |= chance.choice([each for each in ready(server.url) if each["running"]])
                os.kill(victim["pid"], signal.SIGKILL)
                victim["at"] = time.perf_counter()

            done, _ = together(server.url, options.streams, options, killing)
            while len(ready(server.url)) < count:
                time.sleep(0.1)
            row = {
                "kill": number + 1,
                "moved": victim["sessions"],
                "differ": sum(a.tokens != b.tokens for a, b in zip(plain, done, strict=True)),
                "longest wait s": round(max(s.longest for s in done), 2),
                "back s": round(time.perf_counter() - victim["at"], 1),
            }
            print(row, flush=True)
            rows.append(row)
    return rows


def warm(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a way to start."""

    async def fill(url: str) -> list[dict[str, Any]]:
        logins = []
        for seed in range(options.chats):
            session = await ramify.connect(url)
            await session.main.append(tokens=prompt(seed, options.length))
            await generate(session, 8)
            logins.append({"session": session.id, "key": session.key})
            await session.close(keep=True)
        return logins

    async def returning(url: str, logins: list[dict[str, Any]]) -> list[float]:
        async def one(login: dict[str, Any]) -> float:
            session = await ramify.connect(url, **login)
            await session.main.append(tokens=prompt(7, 16))
            outcome = await generate(session, 8)
            await session.close(keep=True)
            return outcome.first

        return await asyncio.gather(*map(one, logins))

    rows = []
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "chats.db"
        own = flags(options, "--store", str(store))
        with served([*own, "--warm-start", "none"], options.shape) as server:
            logins = asyncio.run(fill(server.url))
        for way in ("cold", "warm") * options.repeats:
            copy = Path(name) / f"{way}.db"
            for path in Path(name).glob("chats.db*"):
                shutil.copy(path, str(path).replace("chats.db", copy.name))
            start = ["--warm-start", "none" if way == "cold" else "auto"]
            with served([*flags(options, "--store", str(copy)), *start], options.shape) as server:
                began = time.perf_counter()
                while (
                    way == "warm"
                    and metric(server.url, "ramify_warm_start_sessions_total") < options.chats
                ):
                    if time.perf_counter() - began > 120:
                        raise RuntimeError("the warm start does not end")
                    time.sleep(0.05)
                took = time.perf_counter() - began
                firsts = asyncio.run(returning(server.url, logins))
            row = {
                "start": way, "warm s": round(took, 2),
                **{f"TTFT p{p} ms": round(1e3 * percentile(firsts, p), 1) for p in (50, 99)},
            }  # fmt: skip
            print(row, flush=True)
            rows.append(row)
            for path in Path(name).glob(f"{copy.name}*"):
                path.unlink()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gateways", type=int, nargs="+", default=[0, 4], help="with replicas")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--clients", type=int, default=4, help="processes with sessions")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=160_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--length", type=int, default=2000, help="tokens of a chat that returns")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json")
    options = parser.parse_args()
    about = machine()
    print(headline(about), flush=True)
    parts = {"scale": scale, "kill": kill, "warm": warm}
    results = {part: parts[part](options) for part in options.parts}
    write_json(options.json, about, results)
    kills = results.get("kill", [])
    return int(any(row["differ"] or row["longest wait s"] > WAIT_S for row in kills))


if __name__ == "__main__":
    sys.exit(main())
