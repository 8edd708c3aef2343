"""KV that goes from replica to replica: what a drain computes again, and what long prompts cost others.

    python benchmarks/kv_moves.py drain [--sessions 40] [--tokens 2000] [--kv-host 0]
    python benchmarks/kv_moves.py roles [--streams 64] [--prompts 20] [--tokens 32000]
    python benchmarks/kv_moves.py kills [--roles prefill=1] [--seconds 60]

    drain    sessions with so many tokens at two replicas, one of which is told to end: prompt tokens
             that the next turns compute, whether texts are as without it, and the time of the move
    roles    streams at two replicas, and long prompts beside them: the times between two deltas of a
             stream, and until first tokens, with `--roles prefill=1` and without

    kills    12 sessions at three replicas, which are told to end and killed at random, some in the midst
             of their drain: the texts must be those of a run in which nobody is. The fake checks its KV

Executors are fakes at an H200's speeds with Llama-8B, `--slower` times slower, so that the processes
which share this machine with the load keep up. The fake's KV has 17 bytes a token.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fake_server import search_path, write_model_folder
from load import ChunkRecorder
from replicas import GenerationStream
from report import headline, machine, percentile, table, write_json

from ramify.actors.engine import running_engine
from ramify.actors.executor.spec import FactorySpec
from ramify.actors.kit.files import allow_files
from ramify.protocol.config import (
    EngineConfig,
    Limits,
    ModelConfig,
    ReplicasConfig,
    ScheduleConfig,
    ServerConfig,
)

STEP_MS, PROMPT_US = 8.0, 24.0  # of a decode step, and of a prompt's token beside it
WORDS = "abcdefghijklmnop"


@asynccontextmanager
async def serving(options: argparse.Namespace, count: int = 2, **replicas: Any) -> AsyncIterator[Any]:
    """An engine with so many replicas, which run in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        size, first = write_model_folder(Path(folder))
        settings = {
            "model": {"vocab_size": size, "first": first, "eos": 2},
            "verify": options.what == "kills",
            "step_seconds": STEP_MS * options.slower / 1e3,
            "prompt_us": PROMPT_US * options.slower,
            "pages": 1 << 20,
            "context": 40_000,
            "host_blocks": options.kv_host,
        }
        config = EngineConfig(
            model=ModelConfig(path=Path(folder), kv_host=1 << 20),
            server=ServerConfig(port=0, grace_s=1.0, ping_interval_s=60.0, ping_timeout_s=600.0),
            limits=Limits(ops_per_second=10_000),
            schedule=ScheduleConfig(itl_target_ms=options.itl_target * options.slower),
            replicas=ReplicasConfig(count=count, **replicas),
        )
        spec = FactorySpec("fake_server:bench_executor", settings)
        async with running_engine(config, spec=spec) as engine:
            core: Any = engine.core
            await until(lambda: len(core.pids) == count)
            yield engine


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.005)


def prompt(number: int, tokens: int) -> str:
    """About so many tokens, which no other number has."""
    pairs = [a + b for a in WORDS for b in WORDS]
    return "".join(pairs[(number * 7919 + i * (number + 1)) % len(pairs)] for i in range(tokens))


# --- drain ----------------------------------------------------------------------------------------


class Talk:
    """A session that says things in turns."""

    def __init__(self, recorder: ChunkRecorder) -> None:
        self.recorder = recorder
        self.ident = 0

    @classmethod
    async def open(cls, port: int) -> "Talk":
        recorder = await ChunkRecorder.connect(port)
        recorder.send({"type": "open", "client": "talk"})
        return cls(recorder)

    async def turn(self, text: str) -> tuple[str, dict[str, Any]]:
        """The answer, and its usage."""
        self.recorder.chunks.clear()
        self.ident += 2
        waiting = asyncio.ensure_future(self.recorder.until_done(1))
        await asyncio.sleep(0)
        message = {"role": "user", "content": text}
        sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
        self.recorder.send(
            {"type": "append", "id": self.ident, "messages": [message]},
            {"type": "generate", "id": self.ident + 1, **sampling},
        )
        await waiting
        said = [message for _, message in self.recorder.messages()]
        text = "".join(each["text"] for each in said if each["type"] == "delta")
        return text, next(each["usage"] for each in said if each["type"] == "done")


async def drained(options: argparse.Namespace, *, drain: bool) -> dict[str, Any]:
    """Two turns of each session, and a drain between them."""
    async with serving(options) as engine:
        talks = [await Talk.open(engine.port) for _ in range(options.sessions)]
        first = [await talk.turn(prompt(i, options.tokens)) for i, talk in enumerate(talks)]
        cores = engine.core.cores
        source, seconds = 0, 0.0
        counts = {number: cores.bindings.count(number) for number in engine.core.pids}
        if drain:
            begin, source = time.perf_counter(), max(counts, key=lambda number: counts[number])
            os.kill(engine.core.pids[source], signal.SIGTERM)
            await until(lambda: not cores.bindings.count(source) + cores.bindings.leaving(source))
            seconds = time.perf_counter() - begin
        second = [await talk.turn(prompt(1000 + i, 20)) for i, talk in enumerate(talks)]
        return {
            "texts": [text for text, _ in first + second],
            "moved": counts[source] if drain else 0,
            "seconds": seconds,
            "blocks": cores.bindings.moves.blocks,
            "new": sum(
                b["prompt"] - a["prompt"] - 16 for (_, a), (_, b) in zip(first, second, strict=True)
            ),
            "computed": sum(usage["prompt"] - usage["cached"] for _, usage in second),
        }


async def drain(options: argparse.Namespace) -> tuple[list[list[str]], Any]:
    """See the module's top."""
    rows = [["", "sessions moved", "blocks", "s", "new tokens", "computed", "texts that differ"]]
    runs: dict[str, Any] = {}
    plain = await drained(options, drain=False)
    for name, blocks in (("no drain", None), ("KV moves", options.kv_host), ("it does not", 0)):
        options.kv_host = options.kv_host if blocks is None else blocks
        run = plain if blocks is None else await drained(options, drain=True)
        differ = sum(a != b for a, b in zip(plain["texts"], run["texts"], strict=True))
        shown = [
            run["moved"],
            run["blocks"],
            round(run["seconds"], 2),
            run["new"],
            run["computed"],
            differ,
        ]
        rows.append([name, *map(str, shown)])
        runs[name] = {key: value for key, value in run.items() if key != "texts"} | {"differ": differ}
    return rows, runs


# --- roles ----------------------------------------------------------------------------------------


async def mixed(options: argparse.Namespace, roles: str | None) -> dict[str, Any]:
    """Streams that last as long as the prompts take, and those prompts one after the other."""
    async with serving(options, roles=roles) as engine:
        alone = PROMPT_US * options.slower * 1e-6 * options.tokens
        tokens = int(
            4 * options.prompts * alone / (STEP_MS * options.slower / 1e3)
        )  # far more than needed
        opened = [
            await GenerationStream.open(engine.port, f"stream {number}", tokens)
            for number in range(options.streams)
        ]
        running = [asyncio.create_task(stream.run()) for stream in opened]
        await asyncio.sleep(2.0)
        long: list[GenerationStream] = []
        began = time.perf_counter()

        async def one(number: int) -> None:
            await asyncio.sleep(number * alone / 2)  # twice as fast as one replica computes them
            stream = await GenerationStream.open(engine.port, prompt(number, options.tokens), 16)
            long.append(stream)
            await stream.run()

        await asyncio.gather(*(one(number) for number in range(options.prompts)))
        ended = time.perf_counter()
        for task in running:
            task.cancel()
        gaps = []
        for stream in opened:
            times = [when for when, _ in stream._recorder.chunks if began <= when <= ended]
            gaps += [b - a for a, b in itertools.pairwise(times)]
        waits = [stream.times[0] - stream.sent for stream in long]
        seconds = [b - a for stream in long for a, b in itertools.pairwise(stream.times)]
        return {
            "gap_p50_ms": percentile(gaps, 50) * 1e3,
            "gap_p99_ms": percentile(gaps, 99) * 1e3,
            "gap_max_ms": max(gaps) * 1e3,
            "ttft_p50_s": percentile(waits, 50),
            "ttft_max_s": max(waits),
            "second_max_ms": max(seconds) * 1e3,
            "all_s": ended - began,
            "blocks": engine.core.cores.bindings.moves.blocks,
        }


async def roles(options: argparse.Namespace) -> tuple[list[list[str]], Any]:
    """See the module's top."""
    runs = {
        name: await mixed(options, role)
        for name, role in (("all do all", None), ("prefill=1", "prefill=1"))
    }
    names = list(next(iter(runs.values())))
    rows = [["", *names]]
    rows += [[name, *(f"{run[each]:.1f}" for each in names)] for name, run in runs.items()]
    return rows, runs


# --- kills ----------------------------------------------------------------------------------------

TALKS, TURNS, REPLICAS = 12, 16, 3


async def disturbed(options: argparse.Namespace, *, disturb: bool) -> dict[str, Any]:
    """All that the sessions are told, and how many replicas were told to end, and killed."""
    texts: dict[int, list[str]] = {}
    counts = {"terminated": 0, "killed": 0}

    async def talks(port: int, number: int) -> None:
        talk, chance, said = await Talk.open(port), random.Random(number), []
        for turn in range(TURNS):
            size = 5000 if chance.random() < 0.2 else chance.randrange(50, 700)
            said.append((await talk.turn(prompt(100 * number + turn, size)))[0])
            await asyncio.sleep(chance.random() * (2.0 if disturb else 0.1))
        texts[number] = said

    def end(pid: int, how: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
            counts["killed" if how is signal.SIGKILL else "terminated"] += 1

    async with serving(options, REPLICAS, roles=options.roles, drain_s=1.0) as engine:
        tasks = [asyncio.create_task(talks(engine.port, number)) for number in range(TALKS)]
        chance, until_s = random.Random(5), time.perf_counter() + options.seconds
        while disturb and time.perf_counter() < until_s and not all(task.done() for task in tasks):
            await asyncio.sleep(chance.uniform(0.3, 2.0))
            pids = list(engine.core.pids.values())
            if len(pids) < REPLICAS - 1:
                continue
            pid = chance.choice(pids)
            end(pid, signal.SIGKILL if chance.random() < 0.35 else signal.SIGTERM)
            if chance.random() < 0.4:
                await asyncio.sleep(chance.uniform(0.0, 0.15))
                end(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        cores = engine.core.cores
        return counts | {"texts": texts, "moved": cores.moves, "blocks": cores.bindings.moves.blocks}


async def kills(options: argparse.Namespace) -> tuple[list[list[str]], Any]:
    """See the module's top."""
    plain = await disturbed(options, disturb=False)
    run = await disturbed(options, disturb=True)
    theirs, ours = run.pop("texts"), plain["texts"]
    run["differ"] = sum(
        a != b for number in ours for a, b in zip(ours[number], theirs[number], strict=True)
    )
    run["turns"] = TALKS * TURNS
    return [list(run), [str(value) for value in run.values()]], run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["drain", "roles", "kills"])
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--slower", type=float, default=4.0)
    parser.add_argument("--kv-host", type=int, default=1 << 14, help="blocks of each replica")
    parser.add_argument("--itl-target", type=float, default=ScheduleConfig().itl_target_ms)
    parser.add_argument("--roles")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = search_path()  # of replicas, which make a `bench_executor`
    options.tokens = options.tokens or (2000 if options.what == "drain" else 32_000)
    allow_files(10_000)
    what = {"drain": drain, "roles": roles, "kills": kills}[options.what]
    rows, runs = asyncio.run(what(options))
    about = machine()
    print(headline(about))
    print(table(rows[0], rows[1:]))
    write_json(options.json, about, runs)


if __name__ == "__main__":
    main()
