"""`programs.py count`: prompt tokens that programs compute, against the least that they could."""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
from program_base import MODEL, ROOMY, counted, works
from program_optimum import Trie, least
from program_runs import Words, asked, on_branches
from program_suite import Work
from report import table, write_json

from ramify.actors.engine import Engine
from ramify.clients import connect

STEP_S = 0.002  # of the faked model: with none at all, the sessions would be slower than the steps
SLACK = 64  # token slots that a request needs beside its own tokens, at most


def executor_tokens(engine: Engine) -> int:
    """`ramify_executor_tokens_total`, as anybody can read it at /metrics."""
    for line in engine.metrics.render().decode().splitlines():
        if line.startswith("ramify_executor_tokens_total "):
            return int(float(line.split()[1]))
    raise LookupError("ramify_executor_tokens_total is not among the metrics")


class Counted(msgspec.Struct):
    """What some programs took. `held`: tokens that they have together."""

    programs: int
    sent: int
    best: int
    computed: int
    held: int
    longest: int
    pool: int

    @property
    def hits(self) -> float:
        """The part of what could be found that was found."""
        return (self.sent - self.computed) / max(1, self.sent - self.best)


async def count_some(some: Sequence[Work], pages: int, words: Words, shared: int | None) -> Counted:
    """All at once, each in a session of its own, or in `shared` sessions by turns."""
    async with counted(pages, STEP_S) as engine, AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(connect(engine.url)) for _ in range(shared or len(some))
        ]
        sessions = [opened[number % len(opened)] for number in range(len(some))]
        before = executor_tokens(engine)
        pairs = zip(sessions, some, strict=True)
        rans = await asyncio.gather(*(on_branches(session, work) for session, work in pairs))
        tokens = executor_tokens(engine) - before
        trie, best, sent, decoded, longest = Trie(), 0, 0, 0, 0
        for session, ran in zip(sessions, rans, strict=True):
            calls = await asked(session, ran, words)
            more, given = least([call for call, _ in calls], [output for _, output in calls], trie)
            best, sent = best + more, sent + given
            decoded += sum(call.output - 1 for call, _ in calls if call.output)
            longest = max(longest, *(len(call.prompt) + len(output) for call, output in calls))
    return Counted(len(some), sent, best, tokens - decoded, len(trie), longest, pages)


def count(options: argparse.Namespace) -> int:
    words = Words(MODEL)
    rows, results, short = [], [], []
    for name, some in works(options, 4000).items():
        alone = asyncio.run(count_some(some[:1], ROOMY, words, options.sessions))
        together = asyncio.run(count_some(some, ROOMY, words, options.sessions))
        pool = max(together.held // 4, together.longest + SLACK)
        quarter = asyncio.run(count_some(some, pool, words, options.sessions))
        for case, found in (("alone", alone), ("at once", together), ("a quarter", quarter)):
            over = found.computed / found.best
            rows.append(
                [name, f"{found.programs} {case}", f"{found.sent:,}", f"{found.best:,}",
                 f"{found.computed:,}", f"{over:.4f}", f"{found.hits:.2%}"]
            )  # fmt: skip
            results.append(
                {"program": name, "case": case, **msgspec.to_builtins(found), "hits": found.hits}
            )
            if case != "a quarter" and found.hits < 0.96:
                short.append(f"{name}, {case}: {found.hits:.2%}")
        print(f"{name}: {rows[-2][-1]} of what could be found", flush=True)
    print(table(["program", "", "sent", "best", "computed", "computed / best", "hits"], rows))
    write_json(options.json, options.about, results)
    print("\n".join(["below 96%:", *short]) if short else "every program finds 96% or more")
    return 1 if short else 0
