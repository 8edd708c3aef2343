"""What others do to a client's first token: a whole server on a CPU with the bundled model.

    python benchmarks/sharing.py [--against FOLDER] [--short 12] [--rounds 2] [--json FILE]

    idle      short prompts of 24 tokens, one after the other, on a server that does nothing else
    prompts   the same, beside a client that always has 4 prompts of 1,900 tokens in work
    priority  the same, the short ones at priority 8 and the long ones at -8
    rows      the same, beside 5 sessions with 64 generations each, which take all 64 rows
    urgent    the same, the 5 sessions at priority -8 and the short ones at 8

TTFT at the client, in milliseconds, median and 99th percentile (the worst but one in a hundred), and
the factor to the idle server of the same round. The model runs on one thread, the load in a process
of its own. `--against FOLDER` is a second source tree that takes turns with this one, so that ratios
are of one run: absolute times depend on the machine's load. A tree that gives no rows back needs hours
for `rows` and `urgent`: take `--output 100 --short 3`. FOLDER/src/ramify has to be a package; in a tree
from before there was one, make it of links to its four folders and an empty `__init__.py` (without that
file the package which is installed would be measured twice).
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from report import headline, machine, percentile, table, write_json

from ramify.clients import connect
from ramify.clients.handles import Branch, Session

ROWS = 64
CASES = {  # name: (load, priority of the load, priority of the short prompts)
    "idle": ("", 0, 0),
    "prompts": ("prompts", 0, 0),
    "priority": ("prompts", -8, 8),
    "rows": ("rows", 0, 0),
    "urgent": ("rows", -8, 8),
}


FLAGS = (f"--max-rows={ROWS}", "--kv-tokens=120000")


class Server:
    """`ramify serve` of a source tree, or of the one that is installed. Use with `with`.

    `flags`: besides those that say where and how quietly it runs.
    """

    def __init__(self, tree: Path | None, flags: Sequence[str] = FLAGS) -> None:
        path = {}
        if tree is not None:
            if not (tree / "src" / "ramify" / "__init__.py").exists():
                raise FileNotFoundError(f"{tree}/src/ramify is no package")
            path = {"PYTHONPATH": str(tree / "src")}
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "ramify.clients.cli", "serve", "--port=0", "--device=cpu",
                "--log-level=warning", "--threads=1", *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **path},
        )  # fmt: skip
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready: "):
                self.url = line.removeprefix("ready: ").strip()
                return
        raise RuntimeError(f"the server ended with code {self._process.wait()}")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ids(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(300, 8000) for _ in range(count)]


async def generate(branch: Branch, tokens: list[int], output: int, priority: int) -> float:
    """Append and generate in one frame. Returns the seconds until the first token."""
    append = {"type": "append", "branch": branch.name, "tokens": tokens}
    options = {"max_tokens": output, "temperature": 0, "ignore_eos": True, "priority": priority}
    begin = time.perf_counter()
    _, generation = await branch.session.send(
        [append, {"type": "generate", "branch": branch.name, **options}]
    )
    first = 0.0
    async for _ in generation:  # type: ignore[union-attr]
        first = first or time.perf_counter() - begin
    return first


# --- the load, in a process of its own ------------------------------------------------------------


async def long_prompts(session: Session, number: int, dice: random.Random, priority: int) -> None:
    while True:
        (branch,) = await session.root(f"long{number}")
        await generate(branch, ids(dice, 1900), 4, priority)
        await branch.drop()


async def long_outputs(
    session: Session, number: int, dice: random.Random, priority: int, output: int
) -> None:
    while True:
        (branch,) = await session.root(f"out{number}")
        await generate(branch, ids(dice, 8), output, priority)
        await branch.drop()


async def load(url: str, kind: str, priority: int, output: int) -> None:
    """Until it is killed. Says so when all of it is under way."""
    dice = random.Random(os.getpid())
    outputs = partial(long_outputs, output=output)
    sessions, each, what = (1, 4, long_prompts) if kind == "prompts" else (5, 64, outputs)
    async with AsyncExitStack() as stack:
        tasks = []
        for _ in range(sessions):
            session = await stack.enter_async_context(connect(url))
            tasks += [
                asyncio.ensure_future(what(session, number, dice, priority)) for number in range(each)
            ]
        await asyncio.sleep(4.0)
        print("under way", flush=True)
        await asyncio.gather(*tasks)


class Load:
    """The load of a case. Use with `with`."""

    def __init__(self, url: str, kind: str, priority: int, output: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--load", url, kind, str(priority), str(output)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the load ended with code {self._process.wait()}")

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


# --- what is measured -----------------------------------------------------------------------------


async def shorts(url: str, count: int, priority: int) -> list[float]:
    """TTFT of so many newcomers, each with a session of its own."""
    dice = random.Random()
    found = []
    for _ in range(count):
        async with connect(url) as session:
            found.append(await generate(session.main, ids(dice, 24), 4, priority))
    return found


def case(url: str, name: str, count: int, output: int) -> list[float]:
    kind, theirs, mine = CASES[name]
    if not kind:
        asyncio.run(shorts(url, 2, mine))  # warm-up
        return asyncio.run(shorts(url, count, mine))
    with Load(url, kind, theirs, output):
        return asyncio.run(shorts(url, count, mine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another source tree")
    parser.add_argument("--short", type=int, default=12, help="newcomers in each case")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--json", help="write all runs to this file")
    parser.add_argument("--output", type=int, default=1500, help="tokens of each of the generations")
    parser.add_argument("--load", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        url, kind, priority, output = options.load
        with suppress(KeyboardInterrupt):
            asyncio.run(load(url, kind, int(priority), int(output)))
        return
    about = machine()
    print(headline(about), flush=True)
    trees: dict[str, Path | None] = {"this": None}
    if options.against:
        trees = {"other": options.against, "this": None}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for label, tree in trees.items():
            for name in dict.fromkeys(["idle", *options.only]):
                with Server(tree) as server:
                    times = case(server.url, name, options.short, options.output)
                found.setdefault((name, label), []).extend(times)
                print(f"{name}, {label}: {1e3 * percentile(times, 50):.0f} ms", flush=True)
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for (name, label), times in found.items():
        idle = percentile(found["idle", label], 50)
        p50, p99 = percentile(times, 50), percentile(times, 99)
        rows.append([name, label, f"{1e3 * p50:.0f}", f"{1e3 * p99:.0f}", f"{p50 / idle:.1f}"])
        results.append({"case": name, "tree": label, "ttft_s": times})
    print(table(["case", "tree", "TTFT ms p50", "p99", "of idle"], sorted(rows)))
    write_json(options.json, about, results)


if __name__ == "__main__":
    main()
