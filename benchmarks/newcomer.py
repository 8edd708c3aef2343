"""How long does a newcomer wait for its first token while another client fills the KV pool?

    python benchmarks/newcomer.py [--sessions 60] [--kv-tokens 4096] [--newcomers 20] [--json FILE]

A whole server on a CPU with the bundled model and two tokens of access: `crowd` and `newcomer`. First
the server is idle. Then every session of the crowd appends a prompt of `--prompt` tokens and generates
`--output` tokens, again and again on the same branch until that is full, then on a new one. So more is
asked for than the pool holds. Newcomers come one after the other, at random moments, each with a session
of its own and a prompt of 24 tokens.

TTFT at the client in milliseconds: median, 99th percentile, worst. In brackets the factor to the same of
the idle server. A step of many rows takes longer than one of a single row, so a factor of some steps is
what is to be had: `step` is the mean step beside the crowd. And what the crowd itself got: generations
that ended, and the longest that one of its generations waited for its first token.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from report import headline, machine, percentile, table, write_json

from ramify.clients import connect
from ramify.clients.bench.server import served
from ramify.clients.handles import Branch

NAMES = ("crowd", "newcomer")


def ids(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(300, 8000) for _ in range(count)]


async def generate(branch: Branch, tokens: list[int], output: int) -> float:
    """Append and generate in one frame. Returns the seconds until the first token."""
    append = {"type": "append", "branch": branch.name, "tokens": tokens}
    options = {"max_tokens": output, "temperature": 0, "ignore_eos": True}
    begin = time.perf_counter()
    _, generation = await branch.session.send(
        [append, {"type": "generate", "branch": branch.name, **options}]
    )
    first = 0.0
    async for _ in generation:  # type: ignore[union-attr]
        first = first or time.perf_counter() - begin
    return first


async def member(url: str, options: argparse.Namespace, dice: random.Random, done: list[float]) -> None:
    """A session of the crowd: turns on one branch until it is full. Notes each turn's TTFT."""
    turns = max(1, (options.context - 1) // (options.prompt + options.output))
    async with connect(url, token=NAMES[0]) as session:
        while True:
            (branch,) = await session.root(f"b{dice.getrandbits(30)}")
            for _ in range(turns):
                done.append(await generate(branch, ids(dice, options.prompt), options.output))
            await branch.drop()


async def crowd(url: str, options: argparse.Namespace) -> None:
    """Until a line comes on standard input; then writes what it had."""
    done: list[float] = []
    loop = asyncio.get_running_loop()
    tasks = [
        asyncio.ensure_future(member(url, options, random.Random(number), done))
        for number in range(options.sessions)
    ]
    print("under way", flush=True)
    stop = loop.run_in_executor(None, sys.stdin.readline)
    await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():  # a member ends by an error only
            task.result()
        task.cancel()
    print(json.dumps(done), flush=True)
    os._exit(0)


class NewcomerCrowd:
    """The crowd, in a process of its own. Use with `with`; `done` is filled at the end."""

    def __init__(self, url: str, argv: list[str]) -> None:
        self.done: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__, *argv, "--crowd", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the crowd ended with code {self._process.wait()}")

    def __enter__(self) -> "NewcomerCrowd":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        self._process.kill()
        self._process.wait()
        if not line:
            raise RuntimeError("the crowd ended by itself: see above")
        self.done = json.loads(line)


async def newcomers(url: str, count: int, pause: float) -> list[float]:
    """TTFT of so many, each `pause` seconds on average after the one before."""
    dice = random.Random()
    found = []
    async with AsyncExitStack():
        for _ in range(count):
            await asyncio.sleep(2 * pause * dice.random())
            async with connect(url, token=NAMES[1]) as session:
                found.append(await generate(session.main, ids(dice, 24), 4))
    return found


def counted(url: str) -> dict[str, float]:
    """The server's numbers by name, labels included."""
    with urllib.request.urlopen(urljoin(url.replace("ws://", "http://"), "/metrics")) as page:
        lines = page.read().decode().splitlines()
    return {name: float(value) for name, value in (e.rsplit(" ", 1) for e in lines if e[0] != "#")}


def measure(options: argparse.Namespace, credentials: str, argv: list[str]) -> dict[str, Any]:
    """Idle, then beside the crowd."""
    flags = [
        f"--kv-tokens={options.kv_tokens}", f"--page-size={options.page_size}",
        f"--context={options.context}", f"--auth-tokens={credentials}", *options.server,
    ]  # fmt: skip
    with served(["--device=cpu", "--threads=1", *flags], None) as server:
        asyncio.run(newcomers(server.url, 3, 0.0))  # warm-up
        idle = asyncio.run(newcomers(server.url, options.newcomers, 0.0))
        with NewcomerCrowd(server.url, argv) as others:
            time.sleep(options.settle)
            before = counted(server.url)
            beside = asyncio.run(newcomers(server.url, options.newcomers, options.pause))
            after = counted(server.url)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {"idle": idle, "beside": beside, "crowd": others.done, "counts": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=60, help="of the crowd")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of each of its turns")
    parser.add_argument("--output", type=int, default=500, help="tokens of each of its outputs")
    parser.add_argument("--newcomers", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.5, help="mean seconds between newcomers")
    parser.add_argument("--settle", type=float, default=6.0, help="seconds of the crowd alone, first")
    parser.add_argument("--kv-tokens", type=int, default=4096)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--json", help="write everything to this file")
    parser.add_argument("--crowd", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("server", nargs="*", help="flags for the server, after --")
    options = parser.parse_args()
    if options.crowd:
        asyncio.run(crowd(options.crowd, options))
        return
    about = machine()
    print(headline(about), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens"
        path.write_text("".join(f'{{"name": "{name}", "token": "{name}"}}\n' for name in NAMES))
        sizes = [
            f"--{name}={getattr(options, name)}" for name in ("sessions", "prompt", "output", "context")
        ]
        found = measure(options, str(path), sizes)
    rows = []
    for name in ("idle", "beside"):
        shown = [percentile(found[name], 50), percentile(found[name], 99), max(found[name])]
        least = [percentile(found["idle"], 50), percentile(found["idle"], 99), max(found["idle"])]
        cells = [f"{1e3 * t:.0f} ({t / base:.1f})" for t, base in zip(shown, least, strict=True)]
        rows.append([name, str(len(found[name])), *cells])
    print(table(["server", "newcomers", "TTFT ms p50", "p99", "worst"], rows))
    counts = found["counts"]
    steps = counts.get("ramify_step_seconds_count", 0.0)
    busy = counts.get("ramify_step_seconds_sum", 0.0)
    print(f"steps {steps:.0f}, {1e3 * busy / max(1.0, steps):.1f} ms each")
    for name in sorted(counts):
        if "retract" in name or "twice" in name or name.startswith("ramify_tokens"):
            print(f"{name} {counts[name]:.0f}")
    print(
        f"crowd: {len(found['crowd'])} turns, slowest first token {max(found['crowd'], default=0):.1f} s"
    )
    write_json(options.json, about, found)


if __name__ == "__main__":
    main()
