"""`programs.py batch`: `run_batch`, killed half-way and started again."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from program_base import counted

from ramify.clients.program import AsyncState, assistant, gen, program, user

FAILING = 700  # the item that fails


@program
async def short(s: AsyncState, number: int) -> str:
    """A program of two calls; one item fails."""
    if number == FAILING:
        raise ValueError("this one fails")
    s += user(f"Item {number}") + assistant(gen("first", max_tokens=4))
    s += user("And then?") + assistant(gen("second", max_tokens=4))
    return await s["second"]


def batch(options: argparse.Namespace) -> int:
    """The client is a process of its own, which is killed when half of its results are written."""

    async def run() -> int:
        async with counted(1 << 18) as engine:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "results.jsonl"
                command = [
                    sys.executable,
                    str(Path(__file__).with_name("programs.py")),
                    "client",
                    engine.url,
                    str(path),
                    str(options.programs),
                ]
                client = await asyncio.create_subprocess_exec(*command)
                while _lines(path) < options.programs // 2:  # noqa: ASYNC110 (nobody tells of a file)
                    await asyncio.sleep(0.01)
                client.kill()
                await client.wait()
                done = _lines(path)
                begin = time.perf_counter()
                client = await asyncio.create_subprocess_exec(*command)
                if await client.wait():
                    return 1
                seconds = time.perf_counter() - begin
                print(f"killed after {done} of {options.programs}; {seconds:.1f} s for the rest")
                lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        items = Counter(line["item"] for line in lines if "run" in line)
        failed = {line["item"]: line["error"] for line in lines if "error" in line}
        right = failed == {FAILING: "ValueError: this one fails"} or options.programs <= FAILING
        whole = len(items) == options.programs - len(failed) and set(items.values()) == {1}
        print(f"{len(items)} done, each once: {whole}; failed: {failed}")
        return 0 if right and whole else 1

    return asyncio.run(run())


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def client(options: argparse.Namespace) -> int:
    """The other process of `batch`."""
    items = [{"number": number} for number in range(options.programs)]
    here = short.using(options.url, temperature=0.0, connect={"ttl_s": 1})
    results = here.run_batch(items, concurrency=32, progress=True, results=options.file)
    return 0 if len(results) == options.programs else 1
