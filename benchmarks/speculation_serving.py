"""What drafts gain through a whole server on a GPU, without a model: random weights of a real shape.

The weights are turned as in `speculation_gpu.py`: the likeliest token behind t is the next one of its
cycle. So the output is known, and every token of it is checked; steps take as long as those of a real
model. Servers with and without drafts run side by side on one GPU, and take turns.

    python benchmarks/speculation_serving.py replay [--batches 1 8 32 128] [--acceptance 0 0.6 0.8 0.9]
        [--shape llama-3.1-8b] [--context 1024] [--output 384] [--repeat 2] [--json FILE]
    python benchmarks/speculation_serving.py chat [--shape llama-3.1-8b] [--sessions 64] [--repeat 2]
        [--json FILE]

`replay`: a drafter that knows the next tokens and is right with a chance that is set, all else as it is
served; each of so many sessions generates from a prompt that is computed already. `chat`: `ramify bench
chat` with `--draft ngram` and without, once with text that goes round in cycles of 64 tokens, once with
prompts in which nothing repeats.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from report import headline, machine, percentile, table, write_json

CYCLE = 64  # tokens
MOST = 7  # drafts of the drafter that knows


# --- the server, and the process of its executor -----------------------------------------------


def executor(acceptance: str | None, cycle: int, **settings: Any) -> Any:
    """As `gpu.startup.load` makes it, but for the weights; the drafter of --draft ngram may be ours.

    `acceptance`: the file that says how often it is right.
    """
    import speculation_gpu

    from ramify.gpu.startup import load
    from ramify.protocol.config import ModelConfig

    load.fill_random = speculation_gpu.turned(load.fill_random, cycle)
    config = ModelConfig(**settings | {"path": Path(settings["path"])})
    if acceptance is not None and config.draft != "none":
        drafter = speculation_gpu.Successor(0, Path(acceptance), cycle)
        load.device_drafter = lambda *about: drafter
    return load.load_executor(config, lambda what, done: None)


def serve(flags: list[str], acceptance: str | None, cycle: int) -> None:
    """`ramify serve` with that executor, where the server has it: in a process of its own on a GPU."""
    import msgspec

    from ramify.actors import engine
    from ramify.actors.executor.spec import ExecutorSpec, FactorySpec
    from ramify.clients import cli
    from ramify.protocol.config import ModelConfig

    def spec(config: ModelConfig) -> ExecutorSpec:
        settings = {"acceptance": acceptance, "cycle": cycle} | msgspec.structs.asdict(config)
        return FactorySpec("speculation_serving:executor", settings | {"path": str(config.path)})

    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    engine.ModelSpec = spec  # type: ignore[misc, assignment]
    sys.exit(cli.main(["serve", *flags]))


@contextmanager
def server(
    flags: Sequence[str], shape: str, cycle: int, acceptance: Path | None = None
) -> Iterator[str]:
    """Its URL, once it is ready."""
    from ramify.clients.bench.server import served
    from ramify.clients.bench.shapes import SHAPES, write_model_folder

    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), shape)
        sizes = SHAPES[shape] | {"tie_word_embeddings": False}
        (Path(folder) / "config.json").write_text(json.dumps(sizes))
        program = [__file__, "serve", "--cycle", str(cycle)]
        program += ["--known", str(acceptance)] if acceptance is not None else []
        model = ["--load-format", "dummy", "--model", folder, "--name", shape]
        with served([*model, *flags], None, program=[*program, "--"]) as found:
            yield found.url


# --- a drafter that knows ----------------------------------------------------------------------


class Crowd:
    """Sessions with a computed prompt each, that generate from it again and again."""

    def __init__(self, url: str, prompts: list[list[int]], vocabulary: int) -> None:
        self._url, self._prompts, self._vocabulary = url, prompts, vocabulary
        self._sessions: list[Any] = []
        self.faults = 0

    async def open(self) -> None:
        import ramify

        for prompt in self._prompts:
            session = await ramify.connect(self._url, tokens=True)
            await session.main.append(tokens=prompt)
            self._sessions.append(session)
        await self.generate(len(self._sessions), 1)  # computes the prompts

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()

    async def generate(self, count: int, output: int) -> tuple[float, float]:
        """The first `count` sessions at once: tokens a second, and the share that drafts gave."""
        sessions = self._sessions[:count]
        begin = time.perf_counter()
        settings = {"max_tokens": output, "temperature": 0.0, "ignore_eos": True}
        results = await asyncio.gather(*(session.main.generate(**settings) for session in sessions))
        seconds = time.perf_counter() - begin
        for prompt, result in zip(self._prompts, results, strict=False):
            wanted = [(prompt[-1] + 1 + i) % self._vocabulary for i in range(output)]
            self.faults += result.tokens != wanted
        for session, prompt in zip(sessions, self._prompts, strict=False):
            await session.main.rollback(to=len(prompt))
        accepted = sum(result.usage.accepted or 0 for result in results)
        return count * output / seconds, accepted / (count * output)


async def replay(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second with and without, in turns, the sessions' prompts computed."""
    from ramify.clients.bench.shapes import SHAPES

    vocabulary = SHAPES[options.shape]["vocab_size"]
    dice, most = random.Random(1), max(options.batches)
    prompts = [[dice.randrange(vocabulary) for _ in range(options.context)] for _ in range(most)]
    room = most * (options.context + 2 * options.output + 64)
    flags = ["--kv-tokens", str(room), "--context", str(options.context + 2 * options.output)]
    flags += ["--max-rows", str(max(16, 2 * most)), *options.flags]
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "acceptance"
        file.write_text("0.8")
        plain, drafted = (
            Crowd(
                stack.enter_context(server([*flags, *more], options.shape, 0, file)), prompts, vocabulary
            )
            for more in (["--draft", "none"], ["--draft", "ngram", "--draft-tokens", str(MOST)])
        )
        for crowd in (plain, drafted):
            await crowd.open()
        for batch in options.batches:
            for acceptance in options.acceptance:
                file.write_text(str(acceptance))
                await drafted.generate(batch, options.output)  # the policy learns
                await plain.generate(batch, options.output)
                pairs, share = list[tuple[float, float]](), 0.0
                for _ in range(options.repeat):
                    without, _ = await plain.generate(batch, options.output)
                    rate, share = await drafted.generate(batch, options.output)
                    pairs.append((without, rate))
                results.append({
                    "batch": batch, "acceptance": acceptance,
                    "ratio": round(percentile([b / a for a, b in pairs], 50), 3),
                    "ratios": [round(b / a, 3) for a, b in pairs],
                    "without": round(pairs[-1][0]), "with": round(pairs[-1][1]),
                    "of drafts": round(share, 2), "wrong outputs": plain.faults + drafted.faults,
                })  # fmt: skip
                print(json.dumps(results[-1]), flush=True)
        for crowd in (plain, drafted):
            await crowd.close()
    return results


# --- chats -------------------------------------------------------------------------------------


def chat(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Row e with n-grams and without, in turns."""
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ["--context", "4096", "--kv-tokens", str(64 * 2048), *options.flags]
        urls = {
            draft: stack.enter_context(server([*flags, "--draft", draft], options.shape, CYCLE))
            for draft in ("none", "ngram")
        }
        seed = 0
        for kind, ids in (("cycles", CYCLE), ("nothing repeats", 10000)):
            rates: dict[str, list[dict[str, Any]]] = {draft: [] for draft in urls}
            for round_ in range(1 + options.repeat):
                for draft, url in urls.items():
                    seed += 1
                    file = folder / "run.json"
                    command = ["bench", "chat", "--url", url, "--ids", str(ids), "--temperature", "0"]
                    command += ["--repeats", "1", "--warmup", "0", "--seed", str(seed)]
                    command += ["--sessions", str(options.sessions), "--json", str(file)]
                    program = [sys.executable, "-m", "ramify.clients.cli", *command]
                    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
                    if round_:  # the first one warms up
                        figures = json.loads(file.read_text())["cases"][0]["figures"]
                        rates[draft].append({name: each["median"] for name, each in figures.items()})
            for draft, runs in rates.items():
                tokens = [run["output_tok_s"] for run in runs]
                base = [run["output_tok_s"] for run in rates["none"]]
                ratios = [a / b for a, b in zip(tokens, base, strict=True)]
                results.append({
                    "text": kind, "draft": draft, "tok/s": round(percentile(tokens, 50)),
                    "ratio": round(percentile(ratios, 50), 3),
                    "ttft ms": round(percentile([run["ttft_mean_ms"] for run in runs], 50), 1),
                    "itl ms": round(percentile([run["itl_mean_ms"] for run in runs], 50), 2),
                    "itl p99 ms": round(percentile([run["itl_p99_ms"] for run in runs], 50), 1),
                })  # fmt: skip
                print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    """Parse, measure, print a table. Exits with 1 if a token was not what it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["replay", "chat", "serve"])
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.0, 0.6, 0.8, 0.9])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--output", type=int, default=384)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--known", help=argparse.SUPPRESS)  # of `serve`, which the others start
    parser.add_argument("--cycle", type=int, default=0, help=argparse.SUPPRESS)
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:at])
    options.flags = words[at + 1 :]  # of the servers
    if options.what == "serve":
        serve(options.flags, options.known, options.cycle)
    about = machine()
    print(headline(about))
    results = asyncio.run(replay(options)) if options.what == "replay" else chat(options)
    print(table(list(results[0]), [[str(value) for value in one.values()] for one in results]))
    write_json(options.json, about, results)
    if any(one.get("wrong outputs") for one in results):
        raise SystemExit("tokens are not what they must be")


if __name__ == "__main__":
    main()
