"""Guessed tokens: the same output with and without, and what they gain.

    python benchmarks/speculation.py equal [--data DIR] [--prompts 1000] [--output 32]
        [--drafts ngram model] [--quantization int8 none] [--page-sizes 1 16] [--threads N] [--json FILE]
        [--device cuda [--deterministic]] [--constrained]
    python benchmarks/speculation.py steps [--data DIR] [--drafts ngram model] [--most 0 1 2 4 8]
        [--batches 1 8] [--prompts 16] [--output 96] [--quantization int8] [--threads N] [--json FILE]
    python benchmarks/speculation.py speed [--data DIR] [--drafts none ngram model] [--streams 1 8]
        [--prompts 16] [--output 96] [--repeat 3] [--json FILE] [--device cuda] [-- SERVER FLAGS]
    python benchmarks/speculation.py texts [--data DIR] --texts FILE

`equal` and `steps` drive the executor alone, with the bundled model. `equal`: every prompt greedily and
in random numbers, a part of them with top-p, penalties and log-probabilities; 16 requests run at once,
each with 0 to 4 guesses a step by chance; all tokens are compared with those of an executor without
drafts.
`steps`: fixed numbers of guesses, side by side with none; with --threads 1 the thread's own time
counts, which other programs on the machine disturb less. `speed` goes through servers, one for each
way of drafting, which take turns, answer by answer (or as many at once as there are streams); the
scheduler decides how much is guessed. `gain`: the median, over these pairs, of how many times the speed
without it is; `cpu_gain`: the same of the server's processor time (with --threads 1: more threads wait
for each other).

What is generated, up to its end: `own`, the model's likeliest answers to questions of the kinds that it
was made for; `chat`, answers to held-out chats of people in random numbers; `calls`, the likeliest
answers to prompts with functions; `repeat`, to "repeat this text". Texts come from --data, the folder of
corpus/ and workloads/; `texts` writes those that the others read to a file, which --texts reads on a
machine without the folder.

On CUDA outputs need not be equal to the bit, but with --deterministic they must be; `equal` has two
steps in flight there. With --constrained its outputs obey a schema or a regex: what must follow, and
guesses as far as they are legal, are drafts.
"""

import argparse
import asyncio
import io
import json
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice, starmap
from pathlib import Path
from typing import Any

from report import headline, machine, percentile, table, write_json

from ramify.gpu.startup.drafts import bundled
from ramify.protocol.plan import ExtendRow, LoadConstraint, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

ROWS = 16
ROOM = 640  # tokens of a row
KINDS = ("own", "chat", "calls", "repeat")
SAVED = 64  # prompts of a kind in a file


# --- texts -------------------------------------------------------------------------------------


class Texts:
    """Prompts as the bundled model's chat template writes them."""

    def __init__(self, data: Path, saved: Path | None = None) -> None:
        self._saved = None if saved is None else json.loads(saved.read_text())
        if self._saved is not None:
            return
        import jinja2
        from tokenizers import Tokenizer

        model = bundled("default_model")
        self._data = data
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        config = json.loads((model / "tokenizer_config.json").read_text())
        self._template = jinja2.Template(config["chat_template"])

    def ids(self, text: str, most: int = 256) -> list[int]:
        """A user's turn, of which the last `most` tokens are kept, and the answer's beginning."""
        ids: list[int] = self._tokenizer.encode(self.turn(text), add_special_tokens=False).ids
        return ids[-most:]

    def turn(self, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        return str(self._template.render(messages=messages, add_generation_prompt=True))

    def save(self, path: Path) -> None:
        """What `of_kind` and `of_workloads` give, so many of each."""
        kinds = {kind: self.of_kind(kind, SAVED) for kind in KINDS}
        path.write_text(json.dumps(kinds | {"workloads": self.of_workloads(1000)}))

    def of_kind(self, kind: str, count: int) -> list[list[int]]:
        """Prompts of one of KINDS."""
        if self._saved is not None:
            return list(self._saved[kind][:count])
        return [self.ids(text) for text in self.kind(kind, count)]

    def of_workloads(self, count: int) -> list[list[int]]:
        """Prompts of all workloads, of 128 tokens at most."""
        if self._saved is not None:
            return list(self._saved["workloads"][:count])
        return [self.ids(text, 128) for text in self.workloads(count)]

    def kind(self, kind: str, count: int) -> list[str]:
        """Questions of one of KINDS."""
        if kind == "own":
            found = self._held_out(lambda source: source in ("synth", "tinystories", "factbook"))
            return random.Random(1).sample(found, count)
        if kind == "chat":
            found = self._held_out(lambda source: source != "synth")
            return random.Random(2).sample(found, count)
        if kind == "calls":
            calls = list(self._workload("function_calling_bfcl.jsonl"))
            picked = random.Random(3).sample(calls, count)
            return [f"{json.dumps(one['functions'])[:500]}\n{first_question(one)}" for one in picked]
        picked = random.Random(4).sample(list(self._workload("gsm8k_test.jsonl")), count)
        return [f"Repeat this text word for word: {one['question']}" for one in picked]

    def workloads(self, count: int) -> list[str]:
        """Texts of all workloads: the longest string of a line, up to 400 characters of it."""
        found: list[str] = []
        for path in sorted((self._data / "workloads").glob("*.jsonl")):
            if not path.name.startswith("trace_"):
                lines = islice(self._workload(path.name), 200)
                found += [text for line in lines if (text := longest_string(line)[:400])]
        return random.Random(5).sample(found, min(count, len(found)))

    def _held_out(self, wanted: Callable[[str], bool]) -> list[str]:
        """The first questions of held-out chats."""
        lines = self._corpus("valid_chat.jsonl.zst", 20_000)
        found = [first_question(line) for line in lines if wanted(line["source"])]
        return [text for text in found if 10 < len(text) < 300]

    def _workload(self, name: str) -> Iterator[Any]:
        with (self._data / "workloads" / name).open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)

    def _corpus(self, name: str, count: int) -> list[Any]:
        command = ["zstd", "-dc", str(self._data / "corpus" / name)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = list(islice(io.TextIOWrapper(process.stdout, encoding="utf-8"), count))
            process.kill()
        return [json.loads(line) for line in lines]


def first_question(line: Any) -> str:
    messages = line["messages"]
    texts = [message["content"] for message in messages if message["role"] == "user"]
    return str(texts[0]) if texts else ""


def longest_string(value: Any) -> str:
    if isinstance(value, str):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((longest_string(part) for part in parts), key=len, default="")


# --- the executor alone ------------------------------------------------------------------------


@dataclass(slots=True)
class Job:
    """One request. `done`: what a step that was in flight then gives it is too much."""

    prompt: list[int]
    sampling: SamplingParams
    constraint: int = 0
    output: list[int] = field(default_factory=list)
    done: bool = False


@dataclass(slots=True)
class Tally:
    """Drafts of all steps."""

    drafted: int = 0
    accepted: int = 0


def executor_of(options: argparse.Namespace, quantization: Any, draft: str, page_size: int = 1) -> Any:
    from ramify.gpu.startup.load import load_executor
    from ramify.protocol.config import ModelConfig

    settings: dict[str, Any] = {"threads": options.threads}
    if options.device == "cuda":
        quantization = "none"
        settings = {"deterministic": options.deterministic, "max_rows": 8 * ROWS}
    config = ModelConfig(
        path=bundled("default_model"), device=options.device, quantization=quantization, draft=draft,
        draft_tokens=8, kv_tokens=ROWS * ROOM, page_size=page_size, **settings,
    )  # fmt: skip
    return load_executor(config, lambda what, done: None)


def run(
    executor: Any,
    jobs: Sequence[Job],
    length: int,
    most: int | None,
    rows: int = ROWS,
    clock: Callable[[], float] = time.perf_counter,
    stop: int = -1,
    depth: int = 1,
    tally: Tally | None = None,
    loads: Sequence[LoadConstraint] = (),
) -> list[float]:
    """Run the jobs, `rows` at once, and give each `length` tokens. Seconds of the steps without prompts.

    `most`: guesses of each row; None: 0 to 4 by chance. `stop`: a token that ends an output. `depth`:
    steps in flight; with several the seconds mean little.
    """
    draw, waiting, tally = random.Random(1), list(jobs)[::-1], tally or Tally()
    running: dict[int, Job] = {}
    pending: deque[tuple[Any, dict[int, Job], float | None]] = deque()
    brought = 0  # of `loads`
    page_size, seconds, closes = executor.info.page_size, list[float](), list[int]()
    while waiting or running or pending:
        if waiting or running:
            free = [row for row in range(rows) if row not in running]
            fresh = {row: waiting.pop() for row in free if waiting}
            old = list(running)
            running |= fresh
            opens, extends = [], []
            for row, job in fresh.items():
                pages = range(row * ROOM // page_size, (row + 1) * ROOM // page_size)
                prompt = pack(job.prompt)
                opens.append(OpenRow(row, row, pack(pages), 0, job.sampling, 0, prompt, job.constraint))
                extends.append(ExtendRow(row, 0, prompt, True))
            drafts = guesses = b""
            if executor.info.drafter and old:
                planned = [draw.randint(0, 4) if most is None else most for _ in old]
                drafts = pack(planned)
                guesses = pack(draw.randint(0, count) for count in planned) if loads else b""
            plan = StepPlan(
                0,
                pack(closes),
                opens,
                [],
                extends,
                pack(old),
                drafts,
                list(loads[brought:]),
                b"",
                guesses,
            )
            brought = len(loads)
            begin, closes = clock(), []
            pending.append((executor.launch(plan), dict(running), None if opens else begin))
            if len(pending) < depth:
                continue
        step, owners, timed = pending.popleft()
        result = step.result()
        if timed is not None:
            seconds.append(clock() - timed)
        counts = list(unpack(result.counts)) or [1] * (len(result.rows) // 4)
        tally.drafted += sum(unpack(result.drafted))
        tally.accepted += sum(counts) - len(counts)
        tokens, first = list(unpack(result.tokens)), 0
        for row, count in zip(unpack(result.rows), counts, strict=True):
            job, output = owners[row], owners[row].output
            first += count
            if job.done:
                continue
            output += tokens[first - count : first]
            if stop in output[-count:]:
                del output[output.index(stop) + 1 :]
            job.done = len(output) >= length or output[-1] == stop
            if job.done:
                del output[length:], running[row]
                closes.append(row)
    executor.launch(StepPlan(0, pack(closes))).result()
    return seconds


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cook", "pilot", "poet"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    ("json_schema", json.dumps(PERSON)),
    ("json_schema", json.dumps({"type": "array", "items": PERSON, "minItems": 2})),
    ("regex", r"([A-Z][a-z]{2,9} (is|was|will be) (here|there|nowhere)\. )+"),
    ("regex", r"(.|\n){40,}"),
]


def constraints() -> list[LoadConstraint]:
    """The vocabulary and CONSTRAINTS, from number 1 on."""
    from ramify.actors.grammar.compile import compile_constraint
    from ramify.actors.grammar.vocabulary import vocabulary_of
    from ramify.protocol.constraints import ConstraintSpec

    bodies = [compile_constraint(ConstraintSpec(kind, text)).body for kind, text in CONSTRAINTS]
    return list(starmap(LoadConstraint, enumerate([vocabulary_of(bundled("default_model")), *bodies])))


def samplings(number: int) -> list[SamplingParams]:
    """Greedy, and in random numbers; every fourth prompt in more than a temperature."""
    if number % 4:
        return [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=number)]
    return [
        SamplingParams(temperature=0.0, frequency_penalty=0.2, repetition_penalty=1.1),
        SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.3, logprobs=2, seed=number),
    ]


def equal(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Raises SystemExit if an output differs on the kernels, which compute the same bits."""
    results: list[dict[str, Any]] = []
    prompts = Texts(options.data, options.texts).of_workloads(options.prompts)
    on_gpu = options.device == "cuda"
    loads = constraints() if options.constrained else []
    for quantization in ["none"] if on_gpu else options.quantization:
        expected: dict[int, list[list[int]]] = {}  # by page size
        ways = [(draft, size) for size in options.page_sizes for draft in ("none", *options.drafts)]
        for draft, size in ways:
            jobs = [
                Job(p, sampling, 1 + n % len(CONSTRAINTS) if loads else 0)
                for n, p in enumerate(prompts)
                for sampling in samplings(n)
            ]
            executor = executor_of(options, quantization, draft, size)
            begin = time.perf_counter()
            drafts = Tally()
            run(
                executor, jobs, options.output, None, depth=2 if on_gpu else 1, tally=drafts, loads=loads
            )
            seconds = time.perf_counter() - begin
            outputs = [job.output for job in jobs]
            wanted = expected.setdefault(size, outputs)
            unlike = sum(a != b for a, b in zip(outputs, wanted, strict=True))
            executor.close()
            results.append({
                "quantization": quantization, "draft": draft, "page_size": size,
                "prompts": len(prompts), "outputs": len(outputs), "unlike": unlike,
                "drafted": drafts.drafted, "accepted": drafts.accepted, "seconds": round(seconds, 1),
            })  # fmt: skip
            print(json.dumps(results[-1]), flush=True)
    if any(one["unlike"] for one in results if one["quantization"] == "int8" or options.deterministic):
        sys.exit("outputs differ")
    return results


def steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second of decoding, by guesses; variants in turn, of each step the best repetition."""
    texts, results = Texts(options.data, options.texts), list[dict[str, Any]]()
    quantization = options.quantization[0]
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    executors = {draft: executor_of(options, quantization, draft) for draft in ["none", *options.drafts]}
    for kind in options.kinds:
        temperature = 1.0 if kind == "chat" else 0.0
        prompts = texts.of_kind(kind, options.prompts)
        for batch in options.batches:
            variants = [
                ("none", 0),
                *((d, most) for d in options.drafts for most in options.most if most),
            ]
            best: dict[Any, list[float]] = {}
            count: dict[Any, int] = {}
            accepted: dict[Any, str] = {}
            for _ in range(options.repeat):
                for draft, most in variants:
                    executor = executors[draft]
                    jobs = [
                        Job(prompt, SamplingParams(temperature=temperature, seed=number))
                        for number, prompt in enumerate(prompts)
                    ]
                    tally = Tally()
                    end = executor.info.eos_token_ids[0]
                    seconds = run(executor, jobs, options.output, most, batch, clock, end, tally=tally)
                    known = best.get((draft, most), seconds)  # the same steps: all is repeatable
                    best[draft, most] = [min(a, b) for a, b in zip(known, seconds, strict=True)]
                    count[draft, most] = sum(len(job.output) for job in jobs)
                    share = tally.accepted / tally.drafted if tally.drafted else 0.0
                    accepted[draft, most] = f"{share:.0%} of {tally.drafted}"
            rates = {variant: count[variant] / sum(seconds) for variant, seconds in best.items()}
            for (draft, most), rate in rates.items():
                gain = rate / rates["none", 0]
                results.append({
                    "kind": kind, "batch": batch, "draft": draft, "most": most,
                    "tokens_per_s": round(rate), "gain": round(gain, 2),
                    "accepted": accepted[draft, most],
                })  # fmt: skip
                print(json.dumps(results[-1]), flush=True)
    for executor in executors.values():
        executor.close()
    return results


# --- through servers ---------------------------------------------------------------------------


async def answer(url: str, prompt: list[int], options: dict[str, Any]) -> tuple[str, int, int]:
    """Generate once in a session of its own: text, output tokens, how many of them were guessed."""
    import ramify

    async with ramify.connect(url) as session:
        await session.main.append(tokens=prompt)
        generation = await session.main.generate(**options)
        usage = generation.usage
        return generation.text, usage.output, getattr(usage, "accepted", None) or 0


async def serve_all(
    url: str, prompts: list[tuple[int, list[int]]], output: int, heat: float
) -> list[tuple[str, int, int]]:
    """All prompts at once, by their numbers."""
    asked = {"max_tokens": output, "temperature": heat}
    return await asyncio.gather(
        *(answer(url, prompt, {**asked, "seed": number}) for number, prompt in prompts)
    )


def processor_time(pid: int) -> float:
    """Seconds that all threads of a process have run."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            spent += int((task / "schedstat").read_text().split()[0])
    return spent * 1e-9


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Raises SystemExit if an answer differs from that without guesses, which may be on CUDA alone."""
    from ramify.clients.bench.server import served

    texts, results = Texts(options.data, options.texts), list[dict[str, Any]]()
    flags = ["--quantization", options.quantization[0], *options.flags]
    if options.device == "cuda":
        flags = ["--device", "cuda", *options.flags]
    if options.threads is not None:
        flags += ["--threads", str(options.threads)]
    with ExitStack() as stack:
        drafts = ["none", *(draft for draft in options.drafts if draft != "none")]
        servers = {d: stack.enter_context(served([*flags, "--draft", d], None)) for d in drafts}
        for kind in options.kinds:
            prompts = texts.of_kind(kind, options.prompts)
            heat = 1.0 if kind == "chat" else 0.0
            for streams in options.batches:
                groups = [
                    list(enumerate(prompts))[i : i + streams] for i in range(0, len(prompts), streams)
                ]
                seconds: dict[str, list[float]] = {draft: [] for draft in drafts}
                cpu: dict[str, list[float]] = {draft: [] for draft in drafts}
                tokens, accepted = dict.fromkeys(drafts, 0), dict.fromkeys(drafts, 0)
                order = list(drafts)
                for group in groups * options.repeat:
                    texts_of = {}
                    order.append(order.pop(0))
                    for draft in order:
                        server = servers[draft]
                        spent, begin = processor_time(server.pid), time.perf_counter()
                        answers = asyncio.run(serve_all(server.url, group, options.output, heat))
                        seconds[draft].append(time.perf_counter() - begin)
                        cpu[draft].append(processor_time(server.pid) - spent)
                        tokens[draft] += sum(output for _, output, _ in answers)
                        accepted[draft] += sum(guessed for _, _, guessed in answers)
                        texts_of[draft] = [text for text, _, _ in answers]
                    if any(found != texts_of["none"] for found in texts_of.values()):
                        sys.exit("answers differ")
                for draft in drafts:
                    gains = [a / b for a, b in zip(seconds["none"], seconds[draft], strict=True)]
                    cpu_gains = [a / b for a, b in zip(cpu["none"], cpu[draft], strict=True)]
                    results.append({
                        "kind": kind, "streams": streams, "draft": draft, "pairs": len(gains),
                        "tokens_per_s": round(tokens[draft] / sum(seconds[draft])),
                        "gain": round(percentile(gains, 50), 2),
                        "quartiles": [round(percentile(gains, share), 2) for share in (25, 75)],
                        "cpu_gain": round(percentile(cpu_gains, 50), 2),
                        "cpu_quartiles": [round(percentile(cpu_gains, share), 2) for share in (25, 75)],
                        "accepted_share": round(accepted[draft] / max(1, tokens[draft]), 2),
                    })  # fmt: skip
                    print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["equal", "steps", "speed", "texts"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--output", type=int)
    parser.add_argument("--drafts", nargs="+", default=["ngram", "model"])
    parser.add_argument("--quantization", nargs="+", default=["int8"], choices=["int8", "none"])
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--most", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--batches", "--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--constrained", action="store_true", help="of `equal`: outputs obey constraints"
    )
    parser.add_argument("--deterministic", action="store_true", help="of `equal` on CUDA")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--json")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:at])
    options.flags = words[at + 1 :]  # of the servers of `speed`
    if options.what == "texts":
        Texts(options.data).save(options.texts)
        return
    options.prompts = options.prompts or (1000 if options.what == "equal" else 16)
    options.output = options.output or (32 if options.what == "equal" else 96)
    about = machine()
    print(headline(about))
    results = {"equal": equal, "steps": steps, "speed": speed}[options.what](options)
    print(table(list(results[0]), [[str(value) for value in one.values()] for one in results]))
    write_json(options.json, about, results)


if __name__ == "__main__":
    main()
