"""`programs.py write` and `drive`: programs as JSON lines, on any server that can be asked."""

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from program_base import FAST, spread, works
from program_runs import Http, Words, on_prompts, width
from program_suite import Work, read, write
from program_ways import marked, whole
from report import table, write_json

from ramify.clients.bench.execute import make_driver
from ramify.clients.bench.history import HistorySession
from ramify.clients.bench.program import Target
from ramify.clients.bench.server import served


def write_file(options: argparse.Namespace) -> int:
    found = [work for some in works(options, options.context).values() for work in some]
    write(options.file, found)
    print(f"{len(found)} programs, {sum(len(work.calls) for work in found)} calls: {options.file}")
    return 0


async def over_http(target: Target, some: Sequence[Work], words: Words) -> list[float]:
    """The same on another engine, each program with connections of its own."""
    driver = make_driver(target)
    sessions = [await driver.session(width(work)) for work in some]

    async def one(session: Any, work: Work) -> float:
        assert isinstance(session, HistorySession)
        begin = time.perf_counter()
        await on_prompts(Http(session), work, words)
        return time.perf_counter() - begin

    try:
        return list(await asyncio.gather(*map(one, sessions, some)))
    finally:
        for session in sessions:
            await session.close()


def drive(options: argparse.Namespace) -> int:
    """Every program of the file alone, then all of a kind at once."""
    words = Words(options.tokenizer)
    kinds: dict[str, list[Work]] = {}
    for work in read(options.file):
        kinds.setdefault(work.program, []).append(work)
    with _target(options) as (target, ways):
        rows, results = [], []
        for name, some in kinds.items():
            output = sum(call.output for work in some for call in work.calls)
            for way in ways:
                alone, together, times = [], [], []
                for number in range(-1, options.repeat):
                    mine = [marked(work, f"{way} {options.seed} {number}") for work in some]
                    each = [_drive(target, [marked(mine[0], "alone")], way, words)[0]]
                    begin = time.perf_counter()
                    _drive(target, mine, way, words)
                    if number >= 0:
                        alone += each
                        times.append(time.perf_counter() - begin)
                        together.append(output / times[-1])
                rows.append([name, way, spread(alone), spread(times), spread(together)])
                figures = {"alone_s": alone, "seconds": times, "output": output}
                results.append({"program": name, "way": way, "programs": len(some), **figures})
                print(f"{name}, {way}: {rows[-1][3]} s", flush=True)
    print(table(["program", "as", "one alone s", "all at once s", "output tok/s"], rows))
    write_json(options.json, options.about, results)
    return 0


def _drive(target: Target, some: Sequence[Work], way: str, words: Words) -> list[float]:
    if target.kind == "ramify":
        return asyncio.run(whole(target.url, some, way, words))
    return asyncio.run(over_http(target, some, words))


@contextmanager
def _target(options: argparse.Namespace) -> Iterator[tuple[Target, list[str]]]:
    """The server, and the ways to drive it."""
    ours = ["branches", "prompts"]
    if options.serve:
        flags = [f"--limit-ops-per-second={FAST}", f"--limit-ops-burst={FAST}", *options.flags]
        with served(flags, options.shape) as server:
            yield Target("ramify", server.url), ours
    elif options.url:
        yield Target("ramify", options.url, token=options.token), ours
    elif options.sglang:
        yield Target("sglang", options.sglang, token=options.token, temperature=0.0), ["prompts"]
    else:
        yield (
            Target("openai", options.openai, options.model, options.token, temperature=0.0),
            ["prompts"],
        )
