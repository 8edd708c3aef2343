"""What constrained decoding costs and what jump-forward saves, beside the engines that others use.

    python benchmarks/constrained.py masks --tokenizer qwen3=FILE --tokenizer mistral=FILE
    python benchmarks/constrained.py jumps --tokenizer qwen3=FILE [--schemas schemas.jsonl --count 300]
    python benchmarks/constrained.py hostile
    python benchmarks/constrained.py cold --tokenizer qwen3=FILE [--count 14]

`masks`: from the schema to the first mask (what depends on the tokenizer alone is made before), by the
clock and in CPU time, the memory that took, and masks in states that are met anew and again. Each
engine, case and tokenizer has a process of its own. outlines-core, xgrammar (without its torch) and
llguidance are measured where they are installed.
`jumps`: forward passes that write a text, with jumps and token by token. The model is simulated: it
wants one text, the canonical JSON of an instance, and takes the tokenizer's tokens of it.
`hostile`: 20 hostile constraints at once: how late is the event loop, and when is the last one refused?
`cold`: schemas that nobody has seen (those of constrained_gpu.py), CPU ms of each stage by the thread's
clock, from the schema in a compile worker to the words that a GPU copies, and what 64 need on 16 cores.

FILE is a tokenizer.json, or tokenizer.json.zst if `zstandard` is installed.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.pool import CompilePool
from ramify.actors.tokenizer import Tokenizer
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.grammar import GrammarVocabulary
from ramify.gpu.constraints.matcher import Matcher
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.errors import ConstraintError, Overloaded

ENGINES = ("ramify", "outlines", "xgrammar", "llguidance")
TIMEOUT = 180


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT, _INTEGER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_PERSON = _object(name=_TEXT, age=_INTEGER, active=_FLAG)
_ADDRESS = _object(street=_TEXT, city=_TEXT, zip=_TEXT, country={"enum": ["FR", "DE", "JP"]})
SCHEMAS: dict[str, dict[str, Any]] = {
    "three fields": _PERSON,
    "nested": _object(
        id=_INTEGER,
        customer=_object(person=_PERSON, address=_ADDRESS),
        items={"type": "array", "items": _object(sku=_TEXT, count=_INTEGER, price={"type": "number"})},
        note={"anyOf": [_TEXT, {"type": "null"}]},
    ),
    "five strings of 200": _object(**{f"f{i}": {"type": "string", "maxLength": 200} for i in range(5)}),
}
INSTANCES: dict[str, Any] = {
    "three fields": {"name": "Ada Lovelace", "age": 36, "active": True},
    "nested": {
        "id": 17,
        "customer": {
            "person": {"name": "Zoë", "age": 41, "active": False},
            "address": {"street": "1 Rue de la Paix", "city": "Paris", "zip": "75002", "country": "FR"},
        },
        "items": [{"sku": "A-1", "count": 2, "price": 9.5}, {"sku": "B-22", "count": 1, "price": 120}],
        "note": None,
    },
    "five strings of 200": {
        f"f{i}": "The quick brown fox jumps over the lazy dog. " * 3 for i in range(5)
    },
}
# the example of the SGLang paper: a character of a novel
CHARACTER = (
    r'\{\n    "name": "[\w\d\s]{1,16}",\n    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    r'    "wand": \{\n        "wood": "[\w\d\s]{1,16}",\n        "core": "[\w\d\s]{1,16}",\n'
    r'        "length": [0-9]{1,2}\.[0-9]{0,2}\n    \},\n    "alive": "(Alive|Deceased)",\n'
    r'    "patronus": "[\w\d\s]{1,16}",\n    "bogart": "[\w\d\s]{1,16}"\n\}'
)
CHARACTER_TEXT = """{
    "name": "Harry Potter",
    "house": "Gryffindor",
    "blood status": "Half-blood",
    "occupation": "auror",
    "wand": {
        "wood": "Holly",
        "core": "Phoenix feather",
        "length": 11.0
    },
    "alive": "Alive",
    "patronus": "Stag",
    "bogart": "Dementor"
}"""


def load(file: Path) -> tuple[Tokenizer, Vocabulary]:
    """The tokenizer of a file, and its vocabulary."""
    data = file.read_bytes()
    if file.suffix == ".zst":
        import zstandard  # the benchmark's own dependency

        data = zstandard.ZstdDecompressor().stream_reader(data).read()
    with tempfile.NamedTemporaryFile(suffix=".json") as plain:
        plain.write(data)
        plain.flush()
        fast = PreTrainedTokenizerFast(tokenizer_file=plain.name)
    known = fast.get_vocab()
    fast.eos_token = next(name for name in ("<|im_end|>", "</s>", "<|endoftext|>") if name in known)
    tokenizer = Tokenizer.of(fast)
    tokens = [b"" if tokenizer.is_added(i) else b for i, b in enumerate(tokenizer.token_bytes)]
    vocabulary = Vocabulary(tokens, tokenizer.eos_ids, tokenizer.encode)
    vocabulary.encode("warm")
    return tokenizer, vocabulary


# --- engines: each makes, from a schema, what writes the next mask into a row and takes a token ---

Follow = tuple[Callable[[np.ndarray], object], Callable[[int], object]]  # type: ignore[type-arg]
Engine = Callable[[dict[str, Any]], Follow]


def ramify(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Engine:
    grammars: list[GrammarVocabulary] = []

    def grammar() -> GrammarVocabulary:
        if not grammars:
            grammars.append(GrammarVocabulary(vocabulary))
        return grammars[0]

    def start(schema: dict[str, Any]) -> Follow:
        compiled = compile_constraint(ConstraintSpec("json_schema", json.dumps(schema)))
        if compiled.backend != "automaton":
            print("(not as an automaton)", file=sys.stderr)
        matcher = constraint_of(compiled.body, vocabulary, grammar).matcher()
        return (lambda row: np.copyto(row, matcher.mask())), matcher.advance

    return start


def outlines(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Engine:
    import outlines_core
    from outlines_core.json_schema import build_regex_from_schema

    ids: dict[bytes, list[int]] = {}
    end = vocabulary.stop_ids[0]
    for i, data in enumerate(vocabulary.tokens):
        if data and i != end:
            ids.setdefault(data, []).append(i)
    known = outlines_core.Vocabulary(end, ids)

    def start(schema: dict[str, Any]) -> Follow:
        regex = build_regex_from_schema(json.dumps(schema), r"[ ]?")
        guide = outlines_core.Guide(outlines_core.Index(regex, known))

        def write(row: Any) -> None:
            guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)

        return write, lambda token: guide.advance(token, return_tokens=False)

    return start


def xgrammar(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Engine:
    import torch
    import xgrammar as x

    info = x.TokenizerInfo(
        [data or b"<%d>" % i for i, data in enumerate(vocabulary.tokens)],
        x.VocabType.RAW,
        vocab_size=vocabulary.size,
        stop_token_ids=list(vocabulary.stop_ids),
    )
    compiler = x.GrammarCompiler(info, max_threads=2, cache_enabled=False)

    def start(schema: dict[str, Any]) -> Follow:
        compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        matcher = x.GrammarMatcher(compiled)

        def write(row: Any) -> None:
            matcher.fill_next_token_bitmask(torch.from_numpy(row)[None])

        return write, matcher.accept_token

    return start


def llguidance(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Engine:
    import llguidance as ll

    shared = GrammarVocabulary(vocabulary).tokenizer

    def start(schema: dict[str, Any]) -> Follow:
        matcher = ll.LLMatcher(
            shared,
            ll.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}),
        )

        def write(row: Any) -> None:
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

        return write, matcher.consume_token

    return start


def peak(*, reset: bool = False) -> int:
    """The most memory that this process had (VmHWM of Linux) since it was reset, in KB."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def measure_one(engine: str, case: str, file: Path) -> dict[str, float]:
    """In a process of its own: times in ms and us, memory in MB."""
    tokenizer, vocabulary = load(file)
    start = globals()[engine](tokenizer, vocabulary)
    row = np.zeros(-(-vocabulary.size // 32), np.int32)
    start({"type": "boolean"})[0](row)  # what is imported or compiled at first use
    before = peak(reset=True)
    begun, cpu = time.perf_counter(), time.process_time()
    write, _ = start(SCHEMAS[case])
    write(row)
    first, cpu = time.perf_counter() - begun, time.process_time() - cpu
    text = json.dumps(INSTANCES[case], separators=(",", ":"), ensure_ascii=False)
    write, take = start(SCHEMAS[case])
    times = []
    cold = []
    for token in tokenizer.encode(text):
        begun = time.perf_counter()
        write(row)
        cold.append(time.perf_counter() - begun)
        for _ in range(20):
            begun = time.perf_counter()
            write(row)
            times.append(time.perf_counter() - begun)
        if not (int(row[token >> 5]) >> (token & 31)) & 1:
            break  # this engine spells it differently
        take(token)
    times.sort()
    return {
        "first_ms": first * 1e3,
        "cpu_ms": cpu * 1e3,
        "new_p50_us": statistics.median(cold) * 1e6,
        "new_max_us": max(cold) * 1e6,
        "warm_p50_us": times[len(times) // 2] * 1e6,
        "warm_p99_us": times[len(times) * 99 // 100] * 1e6,
        "memory_mb": (peak() - before) / 1024,
        "steps": len(cold),
    }


def masks(tokenizers: dict[str, Path], engines: list[str], repeats: int) -> None:
    print(
        "tokenizer  case                 engine      first mask ms, CPU ms | anew us p50, max "
        "| again us p50, p99 | MB"
    )
    for name, file in tokenizers.items():
        for case in SCHEMAS:
            for engine in engines:
                found = _measured(engine, case, file, repeats)
                print(f"{name:10} {case:20} {engine:11} {found}", flush=True)


def _measured(engine: str, case: str, file: Path, repeats: int) -> str:
    """The best of some processes, in words."""
    runs: list[dict[str, float]] = []
    for _ in range(repeats):
        command = [sys.executable, __file__, "one", engine, case, str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"more than {TIMEOUT} s"
        if done.returncode:
            return done.stderr.strip().splitlines()[-1][:80]
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    best = {key: min(run[key] for run in runs) for key in runs[0]}
    return (
        "{first_ms:12.1f} {cpu_ms:8.1f} | {new_p50_us:7.1f} {new_max_us:8.0f} | "
        "{warm_p50_us:7.1f} {warm_p99_us:7.1f} | {memory_mb:5.0f}"
    ).format(**best)


# --- jumps ---


def write_text(
    matcher: Matcher, vocabulary: Vocabulary, text: bytes, jump: bool
) -> tuple[int, int, int]:
    """Forward passes, tokens, and forced bytes of an output that is `text`. Raises ValueError."""
    passes = tokens = forced = at = 0
    table = vocabulary.tokens
    while at < len(text) or not matcher.is_final():
        plan = matcher.plan()
        drafts: tuple[int, ...] = ()
        if jump:
            for token in plan.forced:
                if not text.startswith(table[token], at) or not matcher.advance(token):
                    raise ValueError("another text is forced")
                at += len(table[token])
                forced += len(table[token])
                tokens += 1
            drafts = plan.drafts
        passes += 1  # with the forced tokens and the drafts in it
        for draft in (*drafts, None):
            if at == len(text) and matcher.is_final():
                break
            token = _wanted(matcher, vocabulary, text, at)
            matcher.advance(token)
            at += len(table[token])
            tokens += 1
            if token != draft:
                break
    return passes, tokens, forced


def _wanted(matcher: Matcher, vocabulary: Vocabulary, text: bytes, at: int) -> int:
    """The tokenizer's next token of the text, or else the longest legal one."""
    mask = matcher.mask()

    def legal(token: int) -> bool:
        return bool(int(mask[token >> 5]) >> (token & 31) & 1)

    try:
        token = vocabulary.encode(text[at : at + 200].decode("utf-8", "ignore"))[0]
        if text.startswith(vocabulary.tokens[token], at) and legal(token):
            return token
    except IndexError:
        pass
    for end in range(min(len(text), at + 32), at, -1):
        node = vocabulary.find(text[at:end])
        if node >= 0 and vocabulary.token[node] >= 0 and legal(int(vocabulary.token[node])):
            return int(vocabulary.token[node])
    raise ValueError("the text is not in the language")


def jumps(tokenizers: dict[str, Path], schemas: Path | None, count: int) -> None:
    cases: list[tuple[str, ConstraintSpec, str]] = [
        ("character JSON", ConstraintSpec("regex", CHARACTER), CHARACTER_TEXT)
    ]
    for name in ("three fields", "nested"):
        text = json.dumps(INSTANCES[name], separators=(",", ":"), ensure_ascii=False)
        cases.append((name, ConstraintSpec("json_schema", json.dumps(SCHEMAS[name])), text))
    for name, file in tokenizers.items():
        _, vocabulary = load(file)
        grammar = GrammarVocabulary(vocabulary)
        for case, spec, text in cases:
            on, off, _ = both_ways(spec, text, vocabulary, grammar)
            print(f"{name:10} {case:20} forward passes {off}, {on} with jumps: {off / on:.2f}x")
        if schemas is not None:
            real(name, schemas, count, vocabulary, grammar)


def both_ways(
    spec: ConstraintSpec, text: str, vocabulary: Vocabulary, grammar: GrammarVocabulary
) -> tuple[int, int, int]:
    """Forward passes with jumps and without, and forced bytes. Raises ValueError and ConstraintError."""
    constraint = constraint_of(compile_constraint(spec).body, vocabulary, lambda: grammar)
    data = text.encode()
    on, tokens, forced = write_text(constraint.matcher(), vocabulary, data, True)
    off, tokens_off, _ = write_text(constraint.matcher(), vocabulary, data, False)
    if tokens != tokens_off:
        raise AssertionError(f"{tokens} tokens with jumps, {tokens_off} without: {spec}")
    return on, off, forced


def real(name: str, file: Path, count: int, vocabulary: Vocabulary, grammar: GrammarVocabulary) -> None:
    """Real schemas, each with its first valid instance, evenly over the file."""
    with file.open() as lines:
        found = [json.loads(line) for line in lines]
    found = [each for each in found if each["valid"]][:: max(1, len(found) // count)][:count]
    passes_on = passes_off = forced_bytes = whole = used = 0
    ratios = []
    for each in found:
        text = json.dumps(each["valid"][0], separators=(",", ":"), ensure_ascii=False)
        try:
            on, off, forced = both_ways(
                ConstraintSpec("json_schema", json.dumps(each["schema"])), text, vocabulary, grammar
            )
        except (ConstraintError, ValueError):
            continue  # refused, or the instance is spelled or ordered in another way
        used += 1
        passes_on, passes_off = passes_on + on, passes_off + off
        forced_bytes, whole = forced_bytes + forced, whole + len(text.encode())
        ratios.append(off / on)
    print(
        f"{name:10} {used} of {len(found)} real schemas: forward passes {passes_off}, {passes_on} with "
        f"jumps: {passes_off / passes_on:.2f}x (median {statistics.median(ratios):.2f}x), "
        f"{forced_bytes / whole:.0%} of the bytes forced"
    )


# --- cold ---

STAGES = ("compile", "pool's loop", "decode", "load", "forced text")


def cold(file: Path, count: int) -> None:
    """Medians of schemas that differ in names and bounds, in a warm worker; the first one apart."""
    from constrained_gpu import record

    from ramify.actors.grammar.compile_program import warm_up
    from ramify.actors.grammar.vocabulary import packed
    from ramify.gpu.constraints.byte_tables import byte_tables
    from ramify.gpu.constraints.loads import read_vocabulary
    from ramify.gpu.constraints.matcher import Automaton
    from ramify.protocol.constraints import decode_body

    vocabulary = read_vocabulary(packed(load(file)[0]), 1 << 20)
    _ = vocabulary.tails  # made with the vocabulary
    warm_up()
    specs = [ConstraintSpec("json_schema", json.dumps(record(5000 + at))) for at in range(count + 1)]
    rows = []
    for spec in specs:
        clock = [time.thread_time()]
        compiled = compile_constraint(spec)
        clock.append(time.thread_time())
        decode_body(compiled.body)
        clock.append(time.thread_time())
        rule = constraint_of(compiled.body, vocabulary, lambda: GrammarVocabulary(vocabulary))
        assert isinstance(rule, Automaton)
        words = np.empty(len(rule.machine.automaton.words), np.int32)
        clock.append(time.thread_time())
        byte_tables(rule.machine, words)
        clock.append(time.thread_time())
        compiling, *loading = np.diff(clock) * 1e3
        rows.append([compiling, 0.0, *loading])
    first, best = rows[0], np.median(rows[1:], axis=0)
    best[1] = asyncio.run(_loop_ms(specs[1:]))
    print(f"{rule.machine.end} states, body {len(compiled.body)} bytes, words {words.nbytes} bytes")
    for name, one, median in zip(STAGES, first, best, strict=True):
        print(f"{name:12} {median:7.2f} ms CPU (the first {one:.2f})")
    workers = 14
    print(
        f"64 on 16 cores: {workers} workers need {-(-64 // workers) * best[0]:.0f} ms, the engine's "
        f"loop {64 * best[1]:.0f}, the executor's threads {64 * sum(best[2:]):.0f}, side by side"
    )


async def _loop_ms(specs: list[ConstraintSpec]) -> float:
    """CPU time of the loop that has the pool, for each of its jobs."""
    pool = CompilePool()

    class Started:
        def started(self, value: object = None) -> None:
            pass

    runner = asyncio.create_task(pool.run(task_status=Started()))  # type: ignore[arg-type]
    await pool.compile(ConstraintSpec("regex", "first"))
    begun = time.thread_time()
    await asyncio.gather(*(pool.compile(spec) for spec in specs))
    used = time.thread_time() - begun
    runner.cancel()
    return used / len(specs) * 1e3


# --- hostile ---

HOSTILE = [
    "[a-z]*a[a-z]{18}",
    "((((a{1,50}){1,50}){1,50}){1,50})",
    ".{2000}",
    "(.|a.){1,900}b{1,900}|x{40}",
    "(?:é{1,100}.){1,100}",
    "(a|b|ab){1,1000}",
]


async def hostile() -> None:
    late: list[float] = []
    own: list[float] = []  # the loop's own work between two looks, by its thread's clock
    answers: list[tuple[float, str]] = []
    pool = CompilePool()

    async def watch() -> None:
        while True:
            begun, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - begun - 0.001)
            own.append(time.thread_time() - used)

    async def ask(spec: ConstraintSpec, owner: str) -> float:
        begun = time.perf_counter()
        try:
            await pool.compile(spec, owner)
            said = "compiled"
        except (ConstraintError, Overloaded) as error:
            said = error.message
        answers.append((time.perf_counter() - begun, said))
        return answers[-1][0]

    def specs() -> Iterator[ConstraintSpec]:
        for i in range(20):
            yield ConstraintSpec("regex", HOSTILE[i % len(HOSTILE)] + "z" * i)

    class Started:
        def started(self, value: object = None) -> None:
            pass

    runner = asyncio.create_task(pool.run(task_status=Started()))  # type: ignore[arg-type]
    await ask(ConstraintSpec("regex", "first"), "honest")
    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.2)
    idle, late[:], own[:] = max(late), [], []
    tasks = [asyncio.create_task(ask(spec, "hostile")) for spec in specs()]
    honest = []
    for i in range(20):
        await asyncio.sleep(0.05)
        honest.append(await ask(ConstraintSpec("regex", f"honest {i}"), "honest"))
    await asyncio.gather(*tasks)
    watcher.cancel()
    slowest = max(seconds for seconds, said in answers if said != "compiled")
    killed = pool.counters.killed
    print(f"the last hostile constraint was refused after {slowest:.1f} s; {killed} were killed")
    print(f"an honest one beside them took {statistics.median(honest) * 1e3:.1f} ms (median)")
    late.sort()
    most, p99 = late[-1] * 1e3, late[len(late) * 99 // 100] * 1e3
    print(f"the event loop was late by {most:.1f} ms at most, {p99:.1f} ms p99")
    print(f"while nothing was compiled: {idle * 1e3:.1f} ms at most")
    print(f"its own work at a time: {max(own) * 1e3:.2f} ms at most")
    runner.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["masks", "jumps", "hostile", "cold", "one"])
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--count", type=int, default=300)
    args = parser.parse_args()
    tokenizers = {name: Path(file) for name, file in (each.split("=", 1) for each in args.tokenizer)}
    if args.what == "one":
        engine, case, file = args.rest
        print(json.dumps(measure_one(engine, case, Path(file))))
    elif args.what == "masks":
        masks(tokenizers, args.engines.split(","), args.repeats)
    elif args.what == "cold":
        cold(next(iter(tokenizers.values())), args.count)
    elif args.what == "jumps":
        jumps(tokenizers, args.schemas, args.count)
    else:
        asyncio.run(hostile())


if __name__ == "__main__":
    main()
