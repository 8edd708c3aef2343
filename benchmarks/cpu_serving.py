"""A chat of several sessions on a CPU: Ramify against `transformers`, side by side.

    python benchmarks/cpu_serving.py [--model DIR] [--sessions 16] [--turns 4] [--input 64]
        [--output 32] [--repeat 3] [--threads N] [--executor thread|process] [--json FILE]

Every session has some turns; a turn appends new input (token ids; its length is drawn from half to
one and a half times --input) and generates --output tokens: greedy, float32, no end of sequence.
All sessions ask for a turn at the same moment, as soon as the turn before has ended for all.

    ramify                `ramify serve` in a process of its own, one WebSocket a session, the Python
                          client; times are taken at the client, which shares the machine
    sequential, batched   `transformers` `generate` in a process of its own, one session after the
                          other or all of them in one left-padded batch, with no network between;
    ... kept              with past_key_values kept per session (or for the whole batch)

Throughput is output tokens over the time from the first turn to the end of the last. TTFT is from
the moment a turn was asked for to its first token. The systems take turns in each repetition, and
ratios are made within a repetition: medians (min-max). A second table is one session alone.

All systems must give the same tokens; the share that do is printed (an argmax can flip between
two sums of another order). No two conversations of a run share a prompt, and every turn is checked
to have found in the cache what it should: its own history but the last token.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any

from report import headline, machine, percentile, spread, table, write_json
from transformers_peer import Prompts, Record, TransformersPeer, Work

from ramify.clients import connect
from ramify.clients.generation import Generation
from ramify.clients.handles import Session

OURS = "ramify"
PEERS = {  # name: (batched, keep)
    "sequential": (False, False),
    "sequential kept": (False, True),
    "batched": (True, False),
    "batched kept": (True, True),
}


class RamifyServer:
    """`ramify serve` on a free port. Use with `with`."""

    def __init__(self, model: Path, threads: int, executor: str) -> None:
        flags = ["--port=0", f"--model={model}", f"--threads={threads}", f"--executor={executor}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ramify.clients.cli", "serve", "--log-level=warning", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.url = self._url()

    def _url(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready: "):
                return line.removeprefix("ready: ").strip()
        raise RuntimeError(f"the server ended with code {self._process.wait()}")

    def run(self, work: Work) -> Record:
        """The conversations of `work`, each on a socket of its own."""
        return asyncio.run(_converse(self.url, work))

    def __enter__(self) -> "RamifyServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)


async def _converse(url: str, work: Work) -> Record:
    record = Record(0.0, outputs=[[] for _ in work.prompts])
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(connect(url, tokens=True)) for _ in work.prompts]
        begin = time.perf_counter()
        for turn in range(len(work.prompts[0])):
            asked_at = time.perf_counter()
            history = [sum(map(len, p[:turn])) + turn * work.output for p in work.prompts]
            turns = [
                _turn(session, prompts[turn], work.output, known)
                for session, prompts, known in zip(sessions, work.prompts, history, strict=True)
            ]
            results = await asyncio.gather(*turns)
            record.asked.append([first - asked_at for first, _ in results])
            for outputs, (_, tokens) in zip(record.outputs, results, strict=True):
                outputs.append(tokens)
        record.seconds = time.perf_counter() - begin
    record.served = record.asked
    return record


async def _turn(
    session: Session, tokens: list[int], output: int, history: int
) -> tuple[float, list[int]]:
    """When the first token came, and all of them. `history`: tokens of the branch before."""
    append = {"type": "append", "tokens": tokens}
    generate = {"type": "generate", "max_tokens": output, "temperature": 0, "ignore_eos": True}
    _, generation = await session.send([append, generate])
    assert isinstance(generation, Generation)
    first, found = 0.0, list[int]()
    async for delta in generation:
        first = first or time.perf_counter()
        found += delta.tokens or ()
    usage = (await generation).usage
    # a first turn may share its first tokens with another's by chance
    known = usage.cached < 4 if history == 0 else usage.cached == history - 1
    if len(found) != output or not known:
        raise AssertionError(f"{len(found)} tokens instead of {output}; history {history}, {usage}")
    return first, found


def make_prompts(sessions: int, turns: int, length: int, vocabulary: int, seed: int) -> Prompts:
    """Random ids; no special token is among them."""
    draw = random.Random(seed)

    def one() -> list[int]:
        return [
            draw.randrange(300, vocabulary) for _ in range(draw.randint(length // 2, length * 3 // 2))
        ]

    return [[one() for _ in range(turns)] for _ in range(sessions)]


def make_model(folder: Path) -> Path:
    """A Llama of 31M random weights with a tokenizer."""
    import torch
    from fake_server import write_model_folder
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, _ = write_model_folder(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def bundled_model() -> Path | None:
    folder = Path(str(files("ramify.gpu") / "default_model"))
    return folder if (folder / "config.json").is_file() else None


def vocabulary_of(model: Path) -> int:
    from tokenizers import Tokenizer

    size: int = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    return size


# --- the comparison ----------------------------------------------------------------------------


class Comparison:
    """Records of all systems, by name, one a repetition."""

    def __init__(self, output: int) -> None:
        self.output = output
        self.records: dict[str, list[Record]] = {}

    def add(self, name: str, record: Record) -> None:
        self.records.setdefault(name, []).append(record)

    def throughput(self, record: Record) -> float:
        """Output tokens per second."""
        tokens = sum(len(turns) for turns in record.outputs) * self.output
        return tokens / record.seconds

    def values(self, name: str, measure: Callable[[Record], float]) -> list[float]:
        return [measure(record) for record in self.records[name]]

    def ratios(self, name: str, measure: Callable[[Record], float]) -> list[float]:
        """Of each repetition: ours over theirs."""
        theirs = self.values(name, measure)
        return [a / b for a, b in zip(self.values(OURS, measure), theirs, strict=True)]

    def equal(self, name: str) -> float:
        """Share of the turns with the same tokens as ours."""
        pairs = [
            (a, b)
            for ours, theirs in zip(self.records[OURS], self.records[name], strict=True)
            for x, y in zip(ours.outputs, theirs.outputs, strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        return sum(a == b for a, b in pairs) / len(pairs)

    def table(self) -> str:
        turns = range(len(self.records[OURS][0].asked))
        columns = ["", "output tok/s", *[f"TTFT {turn + 1} ms" for turn in turns], "same tokens"]
        rows = []
        for name in self.records:
            cells = [_cell(self.values(name, self.throughput))]
            cells += [_cell(self.values(name, ttft(turn))) for turn in turns]
            rows.append([name, *cells, f"{self.equal(name):.0%}"])
        for name in self.records:
            if name != OURS:
                # above 1: ours is better
                cells = [_cell(self.ratios(name, self.throughput), 2)]
                for turn in turns:
                    cells.append(_cell([1 / r for r in self.ratios(name, ttft(turn))], 2))
                rows.append([f"better than {name} by", *cells, ""])
        return table(columns, rows)

    def report(self) -> dict[str, Any]:
        """For JSON."""
        turns = range(len(self.records[OURS][0].asked))
        return {
            name: {
                "tokens_per_s": self.values(name, self.throughput),
                "ttft_ms": [self.values(name, ttft(turn)) for turn in turns],
                "ttft_each_s": [record.asked for record in records],
                "same_tokens": self.equal(name),
            }
            for name, records in self.records.items()
        }

    def lost(self) -> list[str]:
        """Where ours was not better, by the median ratio: throughput, TTFT from the second turn on."""
        found = []
        for name in self.records:
            if name == OURS:
                continue
            if percentile(self.ratios(name, self.throughput), 50) <= 1:
                found.append(f"throughput against {name}")
            for turn in range(1, len(self.records[OURS][0].asked)):
                if percentile(self.ratios(name, ttft(turn)), 50) >= 1:
                    found.append(f"TTFT of turn {turn + 1} against {name}")
        return found


def ttft(turn: int) -> Callable[[Record], float]:
    """Median over the sessions, ms."""
    return lambda record: percentile(record.asked[turn], 50) * 1e3


def _cell(values: list[float], digits: int = 0) -> str:
    found = spread(values)
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}-{found['max']:.{digits}f})"


def compare(
    server: RamifyServer, peer: TransformersPeer, sessions: int, options: argparse.Namespace, size: int
) -> Comparison:
    """Interleaved repetitions, each with its own prompts, after one that warms everything up."""
    found = Comparison(options.output)
    systems = dict(PEERS) if sessions > 1 else {k: v for k, v in PEERS.items() if not v[0]}
    for repetition in range(options.repeat + 1):
        seed = 1000 * sessions + repetition  # what one run cached must be of no use to another
        prompts = make_prompts(sessions, options.turns, options.input, size, seed)
        if repetition == 0:
            prompts = [turns[:2] for turns in prompts]
        names = [OURS, *systems]
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            batched, keep = systems.get(name, (False, False))
            work = Work(batched, keep, options.output, prompts)
            record = server.run(work) if name == OURS else peer.run(work)
            if repetition:
                found.add(name, record)
        load = f"load average {os.getloadavg()[0]:.1f}"
        print(f"{sessions} sessions, repetition {repetition}: {load}", file=sys.stderr, flush=True)
    found.records = {name: found.records[name] for name in [OURS, *systems]}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="default: the bundled one, else random weights")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--input", type=int, default=64, help="new tokens a turn, on average")
    parser.add_argument("--output", type=int, default=32, help="tokens generated a turn")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--executor", choices=["thread", "process"], default="thread")
    parser.add_argument("--json", help="write all records to this file")
    options = parser.parse_args()
    about = machine(["ramify", "torch", "transformers", "websockets"])
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or bundled_model() or make_model(Path(folder))
        size = vocabulary_of(model)
        print(headline(about))
        print(f"model {model.name}, {options.threads} threads, executor in a {options.executor}\n")
        results, lost = {}, []
        with (
            RamifyServer(model, options.threads, options.executor) as server,
            TransformersPeer(model, options.threads) as peer,
        ):
            for sessions in (options.sessions, 1):
                found = compare(server, peer, sessions, options, size)
                print(f"{sessions} session(s)\n{found.table()}\n", flush=True)
                results[sessions] = found.report()
                lost += [f"{sessions} session(s): {what}" for what in found.lost()]
    write_json(options.json, about, results)
    print("\n".join(["not better:", *lost]) if lost else "better everywhere")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
