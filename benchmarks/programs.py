"""Whole programs: what they compute, how fast they are, against clients that know no branches.

    python benchmarks/programs.py count [--data FOLDER] [--programs 64] [--json FILE]
    python benchmarks/programs.py race  [--data FOLDER] [--programs 4] [--repeat 3] [--json FILE]
    python benchmarks/programs.py write FILE [--data FOLDER] [--programs 64] [--context 32768]
    python benchmarks/programs.py drive FILE --serve [--shape NAME] | --url WS | --sglang URL
                                           | --openai URL --model NAME
    python benchmarks/programs.py delay [--ms 80] [--repeat 3] [--json FILE]
    python benchmarks/programs.py batch [--programs 1000]

The programs are those of the SGLang paper (`program_suite.py` says what each one does), with the real
data sets of --data FOLDER, or with made-up words. Each has a session of its own.

count   The real engine and a model that is faked. `computed`: prompt tokens that the executor ran, by
        its own count, less what was decoded. `best`: the same for a cache that never forgets, by a
        plain trie over the token sequences (`program_optimum.py`). `sent`: what a stateless client
        sends. `hits`: the share of what could be found that was found. One program alone, all at once,
        and all at once in a KV pool of a quarter of the tokens that they hold together (but one that
        holds the longest of them). --sessions N: the programs share so many sessions.
race    The default model on a CPU, one server for all, programs a second: `branches`, programs in
        frames; `prompts`, a stateless client, cache on; `no cache`, the same with two tokens of its own
        before each call, so that nothing is found; `transformers`, `generate`, one program after the
        other, each round of it as one padded batch. Median and range of --repeat; "over": the
        median of the ratio in each round, how many times as fast branches are.
write   Programs as JSON lines, for `drive`.
drive   The lines of FILE on a GPU or wherever: one alone, and all of a kind at once: seconds, output
        tokens a second. With a Ramify server both as branches and as a stateless client.
delay   One program alone over a link with so long a round trip, fake model: as branches, as a stateless
        client; "trips": what the link adds, in round trips, against the same without the link's delay.
batch   `run_batch` of so many programs, one of which fails, killed half-way and started again.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.resources import files
from itertools import count as counting
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from program_optimum import Trie, least
from program_runs import Asked, Http, Roots, Words, asked, drop, on_branches, on_prompts, width
from program_suite import PROGRAMS, Source, Work, build, read, write
from report import headline, machine, percentile, table, write_json

from ramify.actors.engine import Engine, running_engine
from ramify.actors.executor.spec import FakeSpec
from ramify.actors.kit.log import LogConfig, configure
from ramify.clients import connect
from ramify.clients.bench.execute import make_driver
from ramify.clients.bench.history import HistorySession
from ramify.clients.bench.program import Target
from ramify.clients.bench.server import served
from ramify.clients.handles import Session
from ramify.clients.program import AsyncState, assistant, gen, program, user
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
        server=ServerConfig(port=0, allowed_hosts=("127.0.0.1",)),
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


async def count_some(some: Sequence[Work], pages: int, words: Words, shared: int | None) -> Counted:
    """All at once, each in a session of its own, or in `shared` sessions by turns."""
    async with counted(pages) as engine, AsyncExitStack() as stack:
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


# --- delay ----------------------------------------------------------------------------------------


@asynccontextmanager
async def slow_link(url: str, one_way_s: float) -> AsyncIterator[str]:
    """A WebSocket address whose bytes take `one_way_s` longer in each direction."""
    address = urlsplit(url)
    carriers: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            while data := await reader.read(1 << 16):
                waiting.put_nowait((clock() + one_way_s, data))
            waiting.put_nowait((clock(), b""))

        reading = asyncio.create_task(read())
        try:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(max(0.0, due - clock()))
                if not data:
                    break
                writer.write(data)
        finally:
            reading.cancel()
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, out = await asyncio.open_connection(address.hostname, address.port)
        for each in (carry(reader, out), carry(back, writer)):
            carriers.add(asyncio.create_task(each))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"ws://127.0.0.1:{port}{address.path}"
        finally:
            for carrier in carriers:
                carrier.cancel()
            await asyncio.gather(*carriers, return_exceptions=True)


async def over_link(name: str, options: argparse.Namespace, ms: float, words: Words) -> list[float]:
    """Seconds of one program as branches and as whole prompts, both warm; medians."""
    takes: list[list[float]] = [[], []]
    async with (
        counted(ROOMY) as engine,
        slow_link(engine.url, ms / 2e3) as url,
        connect(url, tokens=True) as session,
    ):
        for number in range(options.repeat + 1):
            (work,) = works(options, 4000, number)[name]
            begin = time.perf_counter()
            ran = await on_branches(session, work)
            takes[0].append(time.perf_counter() - begin)
            await drop(session, ran)
            begin = time.perf_counter()
            await on_prompts(Roots(session), work, words)
            takes[1].append(time.perf_counter() - begin)
    return [percentile(each[1:], 50) for each in takes]


def delay(options: argparse.Namespace) -> int:
    words, rows, results = Words(MODEL), [], []
    options.programs = 1
    for name in options.only:
        near = asyncio.run(over_link(name, options, 0.0, words))
        far = asyncio.run(over_link(name, options, options.ms, words))
        trips = [(b - a) * 1e3 / options.ms for a, b in zip(near, far, strict=True)]
        results.append({"program": name, "near_s": near, "far_s": far, "trips": trips})
        rows.append([name, *(f"{b:.3f} ({a:.3f})" for a, b in zip(near, far, strict=True))])
        rows[-1] += [f"{count:.1f}" for count in trips]
        print(f"{name}: {trips[0]:.1f} and {trips[1]:.1f} round trips", flush=True)
    heads = ["program", "branches s (near)", "prompts s (near)", "trips", "trips"]
    print(table(heads, rows))
    write_json(options.json, options.about, results)
    return 0


# --- race -----------------------------------------------------------------------------------------


class Transformers:
    """`generate` of `transformers`, in this process: each round of a program as one padded batch."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        settings = self._model.generation_config
        settings.eos_token_id, settings.pad_token_id, settings.do_sample = None, 0, False
        settings.temperature = settings.top_p = settings.top_k = None

    async def ask(self, calls: Sequence[Asked]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in calls]
        lengths = sorted({call.output for call in calls if call.output})
        for output in lengths:
            places = [i for i, call in enumerate(calls) if call.output == output]
            for i, tokens in zip(
                places, self._generate([calls[i].prompt for i in places], output), strict=True
            ):
                found[i] = tokens
        places = [i for i, call in enumerate(calls) if call.choices]
        if places:
            for i, best in zip(places, self._choose([calls[i] for i in places]), strict=True):
                found[i] = list(calls[i].targets[best])
        return found

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Left-padded ids and their mask."""
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(p)) + list(p) for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        return self._torch.tensor(ids), self._torch.tensor(mask)

    def _generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        ids, mask = self._padded(prompts)
        made = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=output)
        rows: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return rows

    def _choose(self, calls: Sequence[Asked]) -> list[int]:
        """The choice with the highest mean log-probability of each call; all in one batch."""
        torch = self._torch
        pairs = [(call.prompt, target) for call in calls for target in call.targets]
        ids, mask = self._padded([[*prompt, *target] for prompt, target in pairs])
        with torch.no_grad():
            keep = max(len(target) for _, target in pairs) + 1
            logits = self._model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits
        scores = []
        for row, (_, target) in enumerate(pairs):
            logs = logits[row, -len(target) - 1 : -1].log_softmax(-1)
            scores.append(float(logs.gather(1, torch.tensor(target)[:, None]).mean()))
        best, at = [], 0
        for call in calls:
            own = scores[at : at + len(call.targets)]
            best.append(own.index(max(own)))
            at += len(own)
        return best


def salts() -> Iterator[list[int]]:
    """Two tokens that no call before had."""
    for number in counting():
        yield [300 + number // 7000, 300 + number % 7000]


def marked(work: Work, mark: str) -> Work:
    """The same program behind a text of its own, so that it finds nothing of an earlier run."""
    calls = [
        msgspec.structs.replace(call, text=f"Run {mark}.\n{call.text}") if call.parent is None else call
        for call in work.calls
    ]
    return Work(work.program, calls)


async def whole(url: str, some: Sequence[Work], how: str, words: Words) -> list[float]:
    """Run them at once, each in a session of its own; the seconds that each one took."""
    salt = salts() if how == "no cache" else None
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(connect(url, tokens=True)) for _ in some]

        async def one(session: Session, work: Work) -> float:
            begin = time.perf_counter()
            if how == "branches":
                await drop(session, await on_branches(session, work))
            else:
                await on_prompts(Roots(session, salt), work, words)
            return time.perf_counter() - begin

        return list(await asyncio.gather(*map(one, sessions, some)))


def race(options: argparse.Namespace) -> int:
    words, ways = Words(MODEL), ["branches", "prompts", "no cache", "transformers"]
    threads = options.threads
    peer = Transformers(MODEL, threads)
    rows, results = [], []
    flags = ["--device=cpu", f"--threads={threads}", f"--limit-ops-per-second={FAST}",
             f"--limit-ops-burst={FAST}"]  # fmt: skip
    with served(flags, None) as server:
        for name, some in works(options, 2000).items():
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(-1, options.repeat):  # the first one warms up
                for way in ways[number % 4 :] + ways[: number % 4]:
                    mine = [marked(work, f"{way} {number}") for work in some]
                    begin = time.perf_counter()
                    if way == "transformers":
                        for work in mine:
                            asyncio.run(on_prompts(peer, work, words))
                    else:
                        asyncio.run(whole(server.url, mine, way, words))
                    if number >= 0:
                        seconds[way].append(time.perf_counter() - begin)
            rates = {way: [len(some) / each for each in times] for way, times in seconds.items()}
            ratios = [_ratio(seconds[way], seconds["branches"]) for way in ways[1:]]
            rows.append([name, *[_spread(rates[way]) for way in ways], *ratios])
            results.append({"program": name, "programs": len(some), "seconds": seconds})
            print("; ".join(rows[-1]), flush=True)
    over = [f"over {way}" for way in ways[1:]]
    print(table(["programs/s", *ways, *over], rows))
    write_json(options.json, options.about, results)
    return 0


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """How many times as long theirs took: the median over the rounds."""
    return f"{percentile([a / b for a, b in zip(theirs, ours, strict=True)], 50):.2f}"


def _spread(values: Sequence[float]) -> str:
    return f"{percentile(list(values), 50):.2f} ({min(values):.2f}-{max(values):.2f})"


# --- write, drive ---------------------------------------------------------------------------------


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
                rows.append([name, way, _spread(alone), _spread(times), _spread(together)])
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


# --- batch ----------------------------------------------------------------------------------------

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
                    __file__,
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


# --- command --------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], programs: int) -> Any:
        made = commands.add_parser(name)
        made.set_defaults(run=run)
        made.add_argument("--programs", type=int, default=programs, help="of each kind")
        made.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
        made.add_argument("--data", type=Path, help="folder of the real data sets")
        made.add_argument("--json", help="write everything to this file")
        return made

    counting_flags = command("count", count, 64)
    counting_flags.add_argument("--sessions", type=int, help="default: one for each program")
    delaying = command("delay", delay, 1)
    delaying.add_argument("--ms", type=float, default=80.0, help="of a round trip")
    delaying.add_argument("--repeat", type=int, default=3)
    racing = command("race", race, 4)
    racing.add_argument("--repeat", type=int, default=3)
    racing.add_argument("--threads", type=int, default=1)
    writing = command("write", write_file, 64)
    writing.add_argument("file", type=Path)
    writing.add_argument("--context", type=int, default=CONTEXT, help="room of a program, in tokens")
    driving = commands.add_parser("drive")
    driving.set_defaults(run=drive)
    driving.add_argument("file", type=Path)
    where = driving.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--serve", action="store_true", help="start `ramify serve`; its flags come after --"
    )
    for kind in ("url", "sglang", "openai"):
        where.add_argument(f"--{kind}", metavar="URL")
    driving.add_argument("--shape", help="with --serve: random weights in this model's shape")
    driving.add_argument("--model", help="the model's name in requests (--openai)")
    driving.add_argument("--token", help="bearer token")
    driving.add_argument("--tokenizer", type=Path, default=MODEL, help="the served model's folder")
    driving.add_argument("--repeat", type=int, default=3)
    driving.add_argument("--seed", type=int, default=0, help="another one for a second run on a server")
    driving.add_argument("--json", help="write everything to this file")
    command("batch", batch, 1000)
    other = commands.add_parser("client")
    other.set_defaults(run=client)
    other.add_argument("url")
    other.add_argument("file", type=Path)
    other.add_argument("programs", type=int)
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.flags = given[end + 1 :]
    configure(LogConfig(level="warning"))
    if options.run is not client:
        options.about = machine(["ramify", "torch", "transformers", "websockets"])
        print(headline(options.about), flush=True)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
