"""What the path around the model costs: scheduler, cache, session, gateway, socket.

    python benchmarks/overhead.py [--json FILE] [--repeat 5] [--steps 0 2]
                                  [--executor thread|process] [--gateways 0 1 2] [--scale 1.0]

A real engine with the fake executor (a step takes 0 or 2 ms and gives each generation one token)
runs in a process of its own; this process is its load: raw sockets that generate at once, each
generation on a socket of its own ("1 x 256"), or 8 branches to a socket ("8 x 32").

    cpu/token    CPU time of the server's process (user + system, the fake's thread included) over
                 the tokens that were delivered; from the frame with `generate` to the last `done`
    loop         the same for the event loop's thread alone: without the fake; with --gateways, of
                 the core, where plans are made
    busy         the share of the time in which that loop used its core, and the busiest gateway's
    plan         from a StepResult's arrival in the scheduler's mailbox to the next StepPlan's
                 departure; "thread": from the moment the fake's thread had the result, so with the
                 time that the loop was busy with sockets and the interpreter lock was taken
    TTFT, ITL    at the client, which shares the machine's cores with the server

Every run checks that each generation delivered all its tokens. Numbers are medians over the runs
(min-max). At 0 ms a step costs what the host costs, and steps run while sockets are written.
"""

import argparse
import asyncio
import gc
import itertools
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from fake_server import FakeServer
from load import ChunkRecorder
from report import headline, machine, percentile, spread, table, write_json

PROMPT = "abcd" * 16


@dataclass
class LoadShape:
    """So many sockets, each with so many branches, each generating so many tokens."""

    branches: int
    sockets: int
    tokens: int

    @property
    def generations(self) -> int:
        return self.branches * self.sockets

    @property
    def name(self) -> str:
        return f"{self.branches} x {self.sockets}"


SHAPES = [
    LoadShape(1, 1, 1000),
    LoadShape(1, 64, 400),
    LoadShape(1, 256, 200),
    LoadShape(8, 8, 400),
    LoadShape(8, 32, 200),
]


@dataclass
class OverheadRun:
    """One run's figures, in microseconds and milliseconds as named."""

    cpu_us: float  # of all processes
    loop_us: float
    loop_busy: float  # per cent of a core
    gateway_busy: float
    tokens_per_s: float
    steps: int
    plan_p50_us: float
    plan_p99_us: float
    thread_p50_us: float
    thread_p99_us: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    frames: int
    load: float = field(default_factory=lambda: os.getloadavg()[0])


async def run(server: FakeServer, shape: LoadShape) -> OverheadRun:
    """All generations at once, once."""
    sockets = [await _ready(server.port, i, shape.branches) for i in range(shape.sockets)]
    names = [f"b{i}" for i in range(shape.branches)]
    generate = {
        "type": "generate",
        "id": 9,
        "branch": names,
        "max_tokens": shape.tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    await asyncio.sleep(0.05)  # the prompts' prefill
    gc.collect()
    gc.disable()
    before = server.snapshot()
    begin = time.perf_counter()
    waits = [asyncio.ensure_future(socket.until_done(shape.branches)) for socket in sockets]
    await asyncio.sleep(0)
    for socket in sockets:
        socket.send(generate)
    await asyncio.gather(*waits)
    elapsed = time.perf_counter() - begin
    after = server.snapshot()
    gc.enable()
    ttft, itl, frames = _latencies(sockets, shape)
    for socket in sockets:
        await socket.end_session()
    total = shape.generations * shape.tokens
    plan, thread = after["plan"], after["from_thread"]
    loop_s = after["loop_cpu"] - before["loop_cpu"]
    gateways = [a - b for a, b in zip(after["gateways"], before["gateways"], strict=True)]
    return OverheadRun(
        cpu_us=(after["cpu"] - before["cpu"] + sum(gateways)) / total * 1e6,
        loop_us=loop_s / total * 1e6,
        loop_busy=loop_s / elapsed * 100,
        gateway_busy=max(gateways, default=0.0) / elapsed * 100,
        tokens_per_s=total / elapsed,
        steps=after["steps"] - before["steps"],
        plan_p50_us=percentile(plan, 50) * 1e6,
        plan_p99_us=percentile(plan, 99) * 1e6,
        thread_p50_us=percentile(thread, 50) * 1e6,
        thread_p99_us=percentile(thread, 99) * 1e6,
        ttft_p50_ms=percentile(ttft, 50) * 1e3,
        ttft_p99_ms=percentile(ttft, 99) * 1e3,
        itl_p50_ms=percentile(itl, 50) * 1e3,
        itl_p99_ms=percentile(itl, 99) * 1e3,
        frames=frames,
    )


async def _ready(port: int, index: int, branches: int) -> ChunkRecorder:
    """A socket with a session whose branches hold a prompt of their own."""
    socket = await ChunkRecorder.connect(port)
    wait = asyncio.ensure_future(socket.until(b'"type":"ok"', 2))
    await asyncio.sleep(0)
    socket.send(
        {"type": "open", "client": "load"},
        {"type": "append", "id": 1, "text": f"{index} {PROMPT}"},
        {"type": "fork", "id": 2, "as": [f"b{i}" for i in range(branches)]},
    )
    await wait
    socket.chunks.clear()
    return socket


def _latencies(sockets: list[ChunkRecorder], shape: LoadShape) -> tuple[list[float], list[float], int]:
    """TTFTs, ITLs (a delta of several tokens counts once), frames; checks that nothing is missing."""
    ttft: list[float] = []
    itl: list[float] = []
    frames = 0
    for socket in sockets:
        last: dict[str, float] = {}
        start: dict[str, int] = {}
        end: dict[str, int] = {}
        done: set[str] = set()
        for when, message in socket.messages():
            if message["type"] == "delta":
                branch = message["branch"]
                if branch in last:
                    itl.append(when - last[branch])
                else:
                    ttft.append(when - socket.sent_at)
                    start[branch] = message["position"]
                last[branch] = when
                end[branch] = message["position"]
                frames += 1
            elif message["type"] == "done":
                usage = message["usage"]
                complete = usage["output"] == shape.tokens and message["reason"] == "length"
                branch = message["branch"]
                if not complete or end[branch] != usage["prompt"] + shape.tokens:
                    raise AssertionError(f"a generation is not complete: {message}")
                done.add(branch)
            else:
                raise AssertionError(f"unexpected: {message}")
        if len(done) != shape.branches:
            raise AssertionError(f"{len(done)} generations of {shape.branches} ended")
    return ttft, itl, frames


def _cell(runs: list[OverheadRun], name: str, digits: int = 0) -> str:
    values = spread([getattr(run, name) for run in runs])
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f}-{values['max']:.{digits}f})"


def _row(shape: LoadShape, step_ms: float, gateways: int, runs: list[OverheadRun]) -> list[str]:
    def two(first: str, second: str, digits: int = 0) -> str:
        a, b = (spread([getattr(r, name) for r in runs])["median"] for name in (first, second))
        return f"{a:.{digits}f} / {b:.{digits}f}"

    return [
        f"{shape.name}, {step_ms:g} ms",
        str(gateways),
        _cell(runs, "cpu_us", 1),
        _cell(runs, "loop_us", 1),
        two("loop_busy", "gateway_busy"),
        _cell(runs, "tokens_per_s"),
        _cell(runs, "plan_p50_us"),
        two("plan_p50_us", "plan_p99_us"),
        two("thread_p50_us", "thread_p99_us"),
        two("ttft_p50_ms", "ttft_p99_ms", 1),
        two("itl_p50_ms", "itl_p99_ms", 2),
    ]


COLUMNS = [
    "branches x sockets, step",
    "gateways",
    "cpu/token us",
    "loop us",
    "busy % loop/gateway",
    "tokens/s",
    "plan us",
    "p50/p99",
    "thread p50/p99",
    "TTFT ms p50/p99",
    "ITL ms p50/p99",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write all runs to this file")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=float, nargs="+", default=[0.0, 2.0], help="ms")
    parser.add_argument("--executor", choices=["thread", "process"], default="thread")
    parser.add_argument("--gateways", type=int, nargs="+", default=[0], help="processes")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tokens per generation")
    parser.add_argument("--only", nargs="+", help='shapes, such as "1x256"')
    options = parser.parse_args()
    unknown = set(options.only or ()) - {shape.name.replace(" ", "") for shape in SHAPES}
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: no such shape")
    about = machine()
    print(headline(about), flush=True)
    shapes = [
        LoadShape(s.branches, s.sockets, max(2, int(s.tokens * options.scale)))
        for s in SHAPES
        if options.only is None or s.name.replace(" ", "") in options.only
    ]
    results: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for step_ms, gateways in itertools.product(options.steps, options.gateways):
        with FakeServer(step_ms=step_ms, executor=options.executor, gateways=gateways) as server:
            asyncio.run(run(server, LoadShape(1, 16, 50)))  # warm-up
            for shape in shapes:
                runs = [asyncio.run(run(server, shape)) for _ in range(options.repeat)]
                rows.append(_row(shape, step_ms, gateways, runs))
                results.append(
                    {
                        "shape": shape.name,
                        "step_ms": step_ms,
                        "gateways": gateways,
                        "runs": [asdict(run) for run in runs],
                    }
                )
                print(f"{rows[-1][0]}, {gateways} gateways: {rows[-1][2]} us/token", flush=True)
    print(table(COLUMNS, rows))
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    write_json(options.json, about, results)


if __name__ == "__main__":
    main()
