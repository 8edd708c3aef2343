"""Several replicas behind fronts: what is lost when one is killed, and what does a token cost?

    python benchmarks/replicas.py kill [--kills 20] [--replicas 4] [--gateways 2] [--streams 40]
                                       [--model fake|bundled]
    python benchmarks/replicas.py cpu [--rounds 9] [--streams 40] [--tokens 300]

40 greedy generations, one replica ended by SIGKILL in their midst, again and again. The texts must be
those of a run in which nobody dies; "wait" is the longest time between two deltas of a stream. The exit
code is 1 if a text differs (where runs without a kill do not differ) or a stream waits over 5 s. All
processes share this machine with the load. `cpu`: CPU time of all processes of a server for a token, in
four layouts that take turns; the fake executor's is in it.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from fake_server import _cpu_of, write_model_folder
from load import ChunkRecorder
from report import headline, machine, table, write_json

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.actors.kit.files import allow_files
from ramify.protocol.config import (
    EngineConfig,
    Limits,
    ModelConfig,
    ReplicasConfig,
    ScheduleConfig,
    ServerConfig,
)

BUNDLED = Path(__file__).resolve().parent.parent / "gpu" / "default_model"
WAIT_S = 5.0  # that no stream may wait
SUBJECTS = "sea clock bread winter key bird moon train map rain".split()  # noqa: SIM905


def ready(port: int) -> list[dict[str, Any]]:
    """The replicas of a server that are."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/info", timeout=30) as answer:
        known = json.load(answer).get("replicas", [])
    return [each for each in known if each["state"] == "ready"]


def _with_children(pid: int) -> list[int]:
    """A process and all that it has started, and those."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _with_children(int(child))
    return found


class ReplicasServer:
    """A server in a process of its own."""

    def __init__(
        self, replicas: int, gateways: int = 0, *, model: str = "fake", step_ms: float = 2.0
    ) -> None:
        program = [sys.executable, __file__, "serve", f"--replicas={replicas}", f"--model={model}"]
        self._process = subprocess.Popen(
            [*program, f"--step-ms={step_ms}", f"--gateways={gateways}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.replicas, self.gateways = replicas, gateways
        while len(self.ready()) < replicas:
            time.sleep(0.1)

    def ready(self) -> list[dict[str, Any]]:
        """The replicas that are."""
        return ready(self.port)

    def cpu(self) -> float:
        """Seconds of CPU time of all its processes."""
        return sum(map(_cpu_of, _with_children(self._process.pid)))

    def __enter__(self) -> "ReplicasServer":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


async def serve(options: argparse.Namespace, folder: Path) -> None:
    """The server's process, until its stdin ends."""
    replicas = ReplicasConfig(count=options.replicas) if options.replicas else None
    server = ServerConfig(port=0, grace_s=1.0, ping_interval_s=60.0, ping_timeout_s=600.0)
    if options.model == "fake":
        size, first = write_model_folder(folder)
        settings = {"step_seconds": options.step_ms / 1e3, "pages": 1 << 18, "context": 4096}
        fake = FakeSpec(settings, {"vocab_size": size, "first": first, "eos": 2})
        model, spec = ModelConfig(path=folder), fake
    else:
        model, spec = ModelConfig(path=BUNDLED, device="cpu", threads=1), None
    config = EngineConfig(
        model=model,
        server=server,
        limits=Limits(ops_per_second=10_000),
        schedule=ScheduleConfig(),
        gateways=options.gateways,
        replicas=replicas,
    )
    allow_files(10_000)
    async with running_engine(config, spec=spec) as engine:
        print(engine.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


# --- streams --------------------------------------------------------------------------------------


class GenerationStream:
    """One generation on a socket of its own."""

    def __init__(self, recorder: ChunkRecorder, tokens: int) -> None:
        self._recorder = recorder
        self._tokens = tokens
        self.text = ""
        self.times: list[float] = []
        self.sent = 0.0

    @classmethod
    async def open(cls, port: int, prompt: str, tokens: int) -> "GenerationStream":
        """A session with a prompt."""
        recorder = await ChunkRecorder.connect(port)
        waiting = asyncio.ensure_future(recorder.until(b'"type":"ok"'))
        await asyncio.sleep(0)
        message = {"role": "user", "content": prompt}
        recorder.send(
            {"type": "open", "client": "load"}, {"type": "append", "id": 1, "messages": [message]}
        )
        await waiting
        return cls(recorder, tokens)

    async def run(self) -> None:
        """Generate, and note when what came."""
        recorder = self._recorder
        recorder.chunks.clear()
        waiting = asyncio.ensure_future(recorder.until_done(1))
        await asyncio.sleep(0)
        sampling = {"temperature": 0, "max_tokens": self._tokens, "ignore_eos": True}
        recorder.send({"type": "generate", "id": 2, **sampling})
        self.sent = recorder.sent_at
        await waiting
        for when, message in recorder.messages():
            if message["type"] == "delta":
                if message.get("truncate") is not None:
                    raise AssertionError(f"a stream was cut back: {message}")
                self.text += message["text"]
                self.times.append(when)
            elif message["type"] == "done":
                if (message["reason"], message["usage"]["output"]) != ("length", self._tokens):
                    raise AssertionError(f"a stream ended early: {message}")
            elif message["type"] != "ok":
                raise AssertionError(f"unexpected: {message}")
        await recorder.end_session()

    def gap(self) -> float:
        """The longest time between two deltas."""
        return max((b - a for a, b in itertools.pairwise([self.sent, *self.times])), default=0.0)


async def streams(
    port: int, prompts: list[str], tokens: int, meanwhile: Any = None
) -> list[GenerationStream]:
    """All at once. `meanwhile` runs beside them."""
    opened = [await GenerationStream.open(port, prompt, tokens) for prompt in prompts]
    await asyncio.gather(*(stream.run() for stream in opened), *([meanwhile()] if meanwhile else []))
    return opened


# --- kill -----------------------------------------------------------------------------------------


def kill(options: argparse.Namespace) -> tuple[list[list[str]], Any, bool]:
    """See the module's top."""
    chance = random.Random(options.seed)
    prompts = [
        f"Tell me {number} things about {SUBJECTS[number % len(SUBJECTS)]}."
        for number in range(options.streams)
    ]
    rounds: list[dict[str, Any]] = []
    layout = options.replicas, options.gateways
    with ReplicasServer(*layout, model=options.model, step_ms=options.step_ms) as server:
        plain = [asyncio.run(streams(server.port, prompts, options.tokens)) for _ in range(2)]
        texts = [stream.text for stream in plain[0]]
        by_itself = sum(a != b.text for a, b in zip(texts, plain[1], strict=True))
        lasts = plain[1][0].times[-1] - plain[1][0].sent
        undisturbed = max(stream.gap() for stream in plain[1])
        print(f"undisturbed: {lasts:.2f} s, longest wait {undisturbed:.2f} s, {by_itself} texts differ")
        for number in range(options.kills):
            victim: dict[str, Any] = {}

            async def killing(victim: dict[str, Any] = victim) -> None:
                await asyncio.sleep(chance.uniform(0.1, 0.7) * lasts)
                ready = await asyncio.to_thread(server.ready)
                victim |= chance.choice([each for each in ready if each["running"]] or ready)
                os.kill(victim["pid"], signal.SIGKILL)

            done = asyncio.run(streams(server.port, prompts, options.tokens, killing))
            differ = sum(a != b.text for a, b in zip(texts, done, strict=True))
            waits = sorted(stream.gap() for stream in done)
            rounds.append(
                {"moved": victim["sessions"], "differ": differ, "longest": waits[-1], "waits": waits}
            )
            print(
                f"{number + 1}: {victim['sessions']} sessions moved, {differ} texts differ, longest "
                f"wait {waits[-1]:.2f} s (median {waits[len(waits) // 2]:.2f})",
                flush=True,
            )
            while len(server.ready()) < options.replicas:
                time.sleep(0.2)
    longest = [each["longest"] for each in rounds]
    differ = sum(each["differ"] for each in rounds)
    row = [
        f"{options.model}, {options.streams} streams, {options.replicas} replicas",
        str(len(rounds)),
        str(sum(each["moved"] for each in rounds)),
        f"{differ} (without a kill {by_itself})",
        f"{statistics.median(longest):.2f} / {max(longest):.2f}",
        f"{undisturbed:.2f}",
    ]
    columns = ["", "kills", "moved", "texts that differ", "longest wait s p50/max", "undisturbed"]
    return [columns, row], rounds, (bool(differ) and not by_itself) or max(longest) > WAIT_S


# --- cpu ------------------------------------------------------------------------------------------


def cpu(options: argparse.Namespace) -> tuple[list[list[str]], Any, bool]:
    """See the module's top."""
    prompts = [f"Tell me {number} things." for number in range(options.streams)]
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        layouts = [
            ReplicasServer(*each, step_ms=options.step_ms) for each in itertools.product((0, 2), (0, 2))
        ]
        servers = list(map(stack.enter_context, layouts))
        for _, server in itertools.product(range(1 + options.rounds), servers):
            spent = server.cpu()
            asyncio.run(streams(server.port, prompts, options.tokens))
            spent = 1e6 * (server.cpu() - spent) / options.tokens / options.streams
            found.setdefault(f"{server.replicas} replicas, {server.gateways} gateways", []).append(spent)
    rows = [
        [name, f"{statistics.median(costs[1:]):.1f}", f"{min(costs[1:]):.1f}-{max(costs[1:]):.1f}"]
        for name, costs in found.items()  # the first round warms
    ]
    return [["", "us of CPU a token, median", "min-max"], *rows], found, False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["kill", "cpu", "serve"])
    parser.add_argument("--json", help="write all runs to this file")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--gateways", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--model", choices=["fake", "bundled"], default="fake")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what == "serve":
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(serve(options, Path(folder)))
        return 0
    about = machine()
    print(headline(about), flush=True)
    rows, results, failed = (kill if options.what == "kill" else cpu)(options)
    print(table(rows[0], rows[1:]))
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    write_json(options.json, about, results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
