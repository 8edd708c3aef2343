"""`programs.py steps`: how many steps one program alone takes, as branches and as whole prompts."""

import argparse
import asyncio

from program_base import MODEL, ROOMY, counted, spread, works
from program_runs import Words
from program_ways import marked, whole
from report import table, write_json

from ramify.actors.engine import Engine

STEP_S = 0.01  # of the faked model: far longer than what happens between two steps
WAYS = ("branches", "prompts")


def steps_of(engine: Engine) -> int:
    """`ramify_steps_total`, as anybody can read it at /metrics."""
    for line in engine.metrics.render().decode().splitlines():
        if line.startswith("ramify_steps_total "):
            return int(float(line.split()[1]))
    raise LookupError("ramify_steps_total is not among the metrics")


async def alone(name: str, options: argparse.Namespace, words: Words) -> dict[str, list[int]]:
    """Steps of one program, the ways in turn, `--repeat` programs of a kind."""
    found: dict[str, list[int]] = {way: [] for way in WAYS}
    async with counted(ROOMY, STEP_S) as engine:
        for number in range(options.repeat):
            (work,) = works(options, 4000, number)[name]
            for way in WAYS:
                before = steps_of(engine)
                await whole(engine.url, [marked(work, f"{way} {number}")], way, words)
                found[way].append(steps_of(engine) - before)
    return found


def steps(options: argparse.Namespace) -> int:
    words, rows, results = Words(MODEL), [], []
    options.programs = 1
    for name in options.only:
        found = asyncio.run(alone(name, options, words))
        rows.append([name, *(spread(found[way]) for way in WAYS)])
        results.append({"program": name, **found})
        print(*rows[-1], sep=" | ", flush=True)
    print(table(["program", *WAYS], rows))
    write_json(options.json, options.about, results)
    return 0
