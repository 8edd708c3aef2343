"""Whole programs: what they compute, how fast they are, against clients that know no branches.

    python benchmarks/programs.py count [--data FOLDER] [--programs 64] [--json FILE]
    python benchmarks/programs.py race  [--data FOLDER] [--programs 4] [--repeat 3] [--json FILE]
    python benchmarks/programs.py write FILE [--data FOLDER] [--programs 64] [--context 32768]
    python benchmarks/programs.py drive FILE (--serve [--shape NAME] | --url WS | --sglang URL | --openai URL --model NAME)
    python benchmarks/programs.py batch [--programs 1000]

The programs are those of the SGLang paper (`program_suite.py` says what each one does), with the real data
sets of --data FOLDER, or with made-up words.

count   The real engine and a model that is faked. `computed`: prompt tokens that the executor ran, by its own
        count, less what was decoded. `best`: the same for a cache that never forgets, by a plain trie over
        the token sequences (`program_optimum.py`). `sent`: what a stateless client sends. `hits`: the
        share of what could be found that was found. One program alone, all at once, and all at once in
        a KV pool of a quarter of the tokens that they hold together.
race    The default model on a CPU, one server for all: programs a second of (branches) programs in frames;
        (prompts) a stateless client, cache on; (no cache) the same with two tokens of its own
        before each call, so that nothing is found; (transformers) `generate`, each round of a program as
        one padded batch. Medians of --repeat, and the ratio of each round.
write   Programs as JSON lines, for `drive`.
drive   The lines of FILE on a GPU or wherever: one at a time, and all at once: output tokens a second,
        seconds of a program. With a Ramify server both as branches and as a stateless client.
batch   `run_batch` of so many programs, one of which fails, killed half-way and started again.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.resources import files
from pathlib import Path

import msgspec
from program_optimum import Trie, least
from program_runs import Words, asked, on_branches
from program_suite import PROGRAMS, Source, Work, build
from report import machine, table, write_json

from ramify.actors.engine import Engine, running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.actors.kit.log import LogConfig, configure
from ramify.clients import connect
from ramify.protocol.config import EngineConfig, Limits, ModelConfig, ServerConfig

MODEL = Path(str(files("ramify.gpu") / "default_model"))
CONTEXT = 1 << 15
ROOMY = 1 << 22  # token slots: nothing is ever evicted
SLACK = 64  # token slots that a request needs beside its own tokens, at most
FAST = 1_000_000  # ops a second: a benchmark is no flood


def works(options: argparse.Namespace, context: int, first: int = 0) -> dict[str, list[Work]]:
    """The chosen programs."""
    source = Source(options.data, context)
    numbers = range(first, first + options.programs)
    return {name: [build(name, number, source) for number in numbers] for name in options.only}


# --- count ----------------------------------------------------------------------------------------


@asynccontextmanager
async def counted(pages: int) -> AsyncIterator[Engine]:
    """An engine whose model is faked, with so many token slots."""
    spec = FakeSpec(
        settings={"verify": False, "context": CONTEXT, "pages": pages},
        model={"vocab_size": 8192, "eos": 2, "first": 300},
    )
    config = EngineConfig(
        model=ModelConfig(path=MODEL),
        server=ServerConfig(port=0),
        limits=Limits(ops_per_second=FAST, ops_burst=FAST),
        executor="thread",
        gateways=0,
    )
    async with running_engine(config, spec=spec) as engine:
        yield engine


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


async def count_some(some: Sequence[Work], pages: int, words: Words) -> Counted:
    """All at once, each in a session of its own."""
    async with counted(pages) as engine, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(connect(engine.url)) for _ in some]
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
        alone = asyncio.run(count_some(some[:1], ROOMY, words))
        together = asyncio.run(count_some(some, ROOMY, words))
        pool = max(together.held // 4, together.longest + SLACK)
        quarter = asyncio.run(count_some(some, pool, words))
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


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path)
    p.add_argument("--programs", type=int, default=64)
    p.add_argument("--only", nargs="+", default=list(PROGRAMS))
    p.add_argument("--json")
    o = p.parse_args()
    configure(LogConfig(level="warning"))
    o.about = machine()
    return count(o)


if __name__ == "__main__":
    sys.exit(main())
