"""Constrained decoding through a server on a GPU: what it costs beside the same without constraints.

    python benchmarks/constrained_gpu.py --tokenizer FILE [--shape llama-3.1-8b] [--json FILE]

FILE is a tokenizer.json, plain or .gz: its vocabulary is the model's. Random weights of the shape; each
stream generates `--tokens` from a prompt of its own, at temperature 1. In turns, on one server:

`one schema` and `many schemas` (one for each stream): objects with bounded strings; `cold` ones were
never seen before, `warm` ones were. The loss is in tokens a second against `free`, the same streams
without constraints and `ignore_eos`, ahead of each round and behind it. TTFT is the first token's.
`beside`: half of the streams have a schema; how long the others' tokens take, against all without.
`jumps`: with a second server, `--no-jump-forward`: an object of mostly forced text (greedy), steps of
the model and seconds. Its outputs are compared: random weights have near ties, so a few may differ.

Each output that ended is parsed; one that did not has to be the beginning of a valid one.
"""

import argparse
import asyncio
import gzip
import json
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from report import headline, machine, write_json

from ramify.clients.bench.server import served

ROUNDS = 50
STOPS = ("<|im_end|>", "</s>", "<|endoftext|>")


def bounded(limit: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": limit}


def closed(**properties: Any) -> dict[str, Any]:
    """An object of exactly these members."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def record(number: int) -> dict[str, Any]:
    """A schema that no other number has."""
    return closed(
        name=bounded(100),
        kind={"enum": [f"first of {number}", f"second of {number}"]},
        age={"type": "integer", "minimum": 0, "maximum": 120 + number % 100},
        **{f"text_{number}_{part}": bounded(200) for part in "abc"},
        alive={"type": "boolean"},
    )


FORCED = closed(
    the_name_of_the_character={"enum": ["Harry Potter", "Hermione Granger", "Ron Weasley"]},
    the_house_of_the_character={"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
    the_occupation_of_the_character={"enum": ["student", "teacher", "ministry of magic"]},
    what_the_wand_is_made_of={"enum": ["holly and phoenix feather", "willow and unicorn hair"]},
    whether_the_character_is_alive={"type": "boolean"},
)


def metric(url: str, name: str) -> float:
    """A number of the server's /metrics."""
    address = re.sub(r"^ws", "http", url).split("/v")[0].rstrip("/") + "/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
    return float(found[1]) if found else float("nan")


class Streams:
    """Sessions with a computed prompt each."""

    def __init__(self, url: str, count: int, prompt: int) -> None:
        self.url, self._count, self._prompt = url, count, prompt
        self._sessions: list[Any] = []

    async def open(self) -> None:
        import ramify

        dice = random.Random(7)
        for _ in range(self._count):
            session = await ramify.connect(self.url)
            await session.main.append(tokens=[dice.randrange(10_000) for _ in range(self._prompt)])
            self._sessions.append(session)

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()

    async def run(self, constraints: Sequence[Any], tokens: int, **settings: Any) -> dict[str, Any]:
        """All at once, one constraint each (None: none): what they wrote, and how long it took."""
        begun = time.perf_counter()
        results = await asyncio.gather(
            *(
                self._one(session, schema, tokens, begun, number, settings)
                for number, (session, schema) in enumerate(zip(self._sessions, constraints, strict=True))
            )
        )
        seconds = max(result["end"] for result in results)
        counts = [result["tokens"] for result in results]
        return {
            "seconds": seconds,
            "tokens": sum(counts),
            "rate": sum(counts) / seconds,
            "ttft_ms": 1000 * statistics.mean(result["first"] for result in results),
            "ttft_ms_max": 1000 * max(result["first"] for result in results),
            "results": results,
        }

    async def _one(
        self, session: Any, schema: Any, tokens: int, begun: float, number: int, settings: Any
    ) -> dict[str, Any]:
        branch = session.main
        options: dict[str, Any] = {"max_tokens": tokens, "temperature": 1.0, "seed": number} | settings
        if schema is None:
            options["ignore_eos"] = True
        else:
            options["json_schema"] = schema
        generation = branch.generate(**options)
        first = None
        async for _ in generation:
            if first is None:
                first = time.perf_counter() - begun
        result = await generation
        end = time.perf_counter() - begun
        await branch.rollback(to=self._prompt)
        first = end if first is None else first
        usage = result.usage
        return {
            "first": first, "end": end, "tokens": usage.output, "forced": usage.forced or 0,
            "text": result.text, "reason": result.reason, "schema": schema,
            "itl_ms": 1000 * (end - first) / max(1, usage.output - 1),
        }  # fmt: skip


def faults(found: dict[str, Any]) -> int:
    """Outputs under a schema that are no JSON of it, or no beginning of one."""
    import jsonschema

    wrong = 0
    for one in found["results"]:
        if one["schema"] is None:
            continue
        try:
            if one["reason"] == "stop":
                jsonschema.validate(json.loads(one["text"]), one["schema"])
            else:
                wrong += not one["text"].startswith('{"')
        except (ValueError, jsonschema.ValidationError):
            wrong += 1
            print("DOES NOT OBEY:", repr(one["text"][:200]), flush=True)
    return wrong


def brief(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "results"}


async def losses(streams: Streams, options: argparse.Namespace) -> list[dict[str, Any]]:
    count, tokens = options.streams, options.tokens
    nothing = [None] * count
    rows: list[dict[str, Any]] = []
    await streams.run(nothing, tokens)
    first = await streams.run([record(0), *nothing[1:]], tokens)
    print(
        f"the server's first constraint: TTFT {1000 * first['results'][0]['first']:.0f} ms", flush=True
    )
    number = 1000
    for many in (False, True):
        for repeat in range(options.repeats):
            number += 100
            schemas = [record(number + (at if many else 0)) for at in range(count)]
            free = [await streams.run(nothing, tokens)]
            rounds = {"cold": await streams.run(schemas, tokens)}
            free.append(await streams.run(nothing, tokens))
            rounds["warm"] = await streams.run(schemas, tokens)
            free.append(await streams.run(nothing, tokens))
            for at, (kind, found) in enumerate(rounds.items()):
                beside = statistics.mean(one["rate"] for one in free[at : at + 2])
                row = {
                    "schemas": count if many else 1, "kind": kind, "repeat": repeat,
                    "free_rate": beside, "free_ttft_ms": free[at]["ttft_ms"],
                    "loss": 1 - found["rate"] / beside, "faults": faults(found), **brief(found),
                    "itl_ms": statistics.mean(one["itl_ms"] for one in found["results"]),
                    "free_itl_ms": statistics.mean(one["itl_ms"] for one in free[at]["results"]),
                    "forced": sum(one["forced"] for one in found["results"]),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{row['schemas']:3} schemas {kind}: {row['rate']:8.0f} tok/s, free {beside:8.0f}: "
                    f"loss {100 * row['loss']:5.1f} %; TTFT {row['ttft_ms']:6.1f} (max "
                    f"{row['ttft_ms_max']:6.1f}), free {row['free_ttft_ms']:6.1f} ms; ITL "
                    f"{row['itl_ms']:5.2f} / {row['free_itl_ms']:5.2f} ms; {row['tokens']} tokens, "
                    f"{row['forced']} forced, faults {row['faults']}",
                    flush=True,
                )
    return rows


async def beside(streams: Streams, options: argparse.Namespace) -> dict[str, Any]:
    count, tokens = options.streams, options.tokens
    half = [record(1) if at % 2 else None for at in range(count)]
    await streams.run(half, tokens)
    alone, mixed = [], []
    for _ in range(options.repeats):
        free = await streams.run([None] * count, tokens)
        alone += [one["itl_ms"] for one in free["results"][::2]]
        both = await streams.run(half, tokens)
        mixed += [one["itl_ms"] for one in both["results"][::2]]
    row = {"alone_itl_ms": statistics.mean(alone), "beside_itl_ms": statistics.mean(mixed)}
    print(
        f"unstructured beside structured: ITL {row['beside_itl_ms']:.2f} against "
        f"{row['alone_itl_ms']:.2f} ms",
        flush=True,
    )
    return row


async def jumps(on: Streams, off: Streams, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for count in (1, 8, options.streams):
        best: dict[str, dict[str, Any]] = {}
        for repeat in range(1 + options.repeats):  # the first one compiles the schema
            for name, streams in (("off", off), ("on", on)):
                some = Streams(streams.url, count, options.prompt)
                some._sessions = streams._sessions[:count]
                before = metric(streams.url, "ramify_steps_total")
                found = await some.run([FORCED] * count, 400, temperature=0.0)
                found["steps"] = metric(streams.url, "ramify_steps_total") - before
                if repeat and (name not in best or found["seconds"] < best[name]["seconds"]):
                    best[name] = found
        texts = {name: [one["text"] for one in best[name]["results"]] for name in best}
        row = {
            "streams": count, "equal": sum(map(str.__eq__, texts["on"], texts["off"])),
            "faults": faults(best["on"]) + faults(best["off"]),
            "steps": [best[name]["steps"] for name in ("off", "on")],
            "seconds": [best[name]["seconds"] for name in ("off", "on")],
            "tokens": best["on"]["tokens"],
            "forced": sum(one["forced"] for one in best["on"]["results"]),
        }  # fmt: skip
        rows.append(row)
        steps, seconds = row["steps"], row["seconds"]
        print(
            f"jumps, {count:3} streams: {row['tokens']} tokens, {row['forced']} forced; steps off / on "
            f"{steps[0]:.0f} / {steps[1]:.0f} = {steps[0] / steps[1]:.2f}; seconds {seconds[0]:.3f} / "
            f"{seconds[1]:.3f} = {seconds[0] / seconds[1]:.2f}; equal {row['equal']}, "
            f"faults {row['faults']}",
            flush=True,
        )
    return rows


def kernels(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds of masks, sampling under them, and advancing: rows inside a string, and in a key."""
    import torch
    from constrained import load

    from ramify.actors.grammar.compile import compile_constraint
    from ramify.gpu.constraints.bodies import constraint_of
    from ramify.gpu.constraints.grammar import GrammarVocabulary
    from ramify.gpu.constraints.matcher import AutomatonConstraint
    from ramify.gpu.sampling.automata import DeviceAutomata
    from ramify.protocol.constraints import ConstraintSpec

    tokenizer, vocabulary = load(folder / "tokenizer.json")
    made = compile_constraint(ConstraintSpec("json_schema", json.dumps(record(1))))
    begun = time.perf_counter()
    rule = constraint_of(made.body, vocabulary, lambda: GrammarVocabulary(vocabulary))
    assert isinstance(rule, AutomatonConstraint)
    machine = rule.machine
    automata = DeviceAutomata(257, vocabulary.size, torch.device(options.device), 128 << 20)
    automata.put(1, machine)
    print(f"tables of {machine.end} states: {1000 * (time.perf_counter() - begun):.0f} ms", flush=True)
    state = 0
    for token in tokenizer.encode('{"name":"some'):
        state = machine.advance(state, token)
    places = {"in a string": state, "in a key": machine.advance(0, tokenizer.encode("{")[0])}
    rows: list[dict[str, Any]] = []
    for name, at in places.items():
        for count in (1, 8, 64, 256):
            rows.append({"rows": count, "where": name, **timed(automata, at, count, vocabulary.size)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def timed(automata: Any, state: int, count: int, size: int) -> dict[str, float]:
    """Microseconds on the device, and of the host's launches, for so many rows in that state."""
    import numpy as np
    import torch

    from ramify.gpu.sampling.automata import Followed, lines_without
    from ramify.gpu.sampling.cuda_sampler import CudaSampler
    from ramify.protocol.plan import OpenRow
    from ramify.protocol.sampling import SamplingParams

    device = automata._arena.device
    sampler = CudaSampler(257, size, device)
    opens = [OpenRow(row, row, b"", 0, SamplingParams(temperature=1.0)) for row in range(count)]
    sampler.apply(0, [], opens)
    for row in range(count):
        automata.close(row)
        automata.open(row, 1, state)
    automata.upload(0)
    logits = torch.randn((count, size), device=device).bfloat16()
    own = np.arange(count)
    last = torch.zeros(257, dtype=torch.int32, device=device)
    tokens, forced = last.clone()[:count], last.clone()[:count]
    lines = lines_without(count, -(-size // 32))
    lines.kinds[:], lines.states[:] = 0, state
    legal = torch.zeros((1, -(-size // 32)), dtype=torch.int32, device=device)

    def sample() -> Followed:
        sampler.resample(0, logits, own, own, last, tokens, None, None, lines, automata)
        assert sampler._followed is not None
        return sampler._followed

    followed = sample()
    steps: dict[str, Any] = {
        "masks": lambda: automata.masks(followed, legal),
        "all": sample,
        "follow": lambda: automata.advance(followed, tokens, None, forced),
    }
    found: dict[str, float] = {}
    for name, call in steps.items():
        call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        launched = time.perf_counter()
        begin.record()
        for _ in range(ROUNDS):
            call()
        launched = time.perf_counter() - launched
        end.record()
        end.synchronize()
        found[f"{name}_us"] = 1000 * begin.elapsed_time(end) / ROUNDS
        found[f"{name}_host_us"] = 1e6 * launched / ROUNDS
    return found


def write_folder(folder: Path, options: argparse.Namespace) -> None:
    """A config of the shape with the tokenizer's vocabulary, and the tokenizer."""
    from ramify.clients.bench.shapes import SHAPES

    data = options.tokenizer.read_bytes()
    if options.tokenizer.suffix == ".gz":
        data = gzip.decompress(data)
    parsed = json.loads(data)
    known = dict(parsed["model"]["vocab"])
    known |= {added["content"]: added["id"] for added in parsed["added_tokens"]}
    stop = next(name for name in STOPS if name in known)
    size = -(-(max(known.values()) + 1) // 64) * 64
    config = SHAPES[options.shape] | {"vocab_size": size, "eos_token_id": known[stop]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(data)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": stop}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        write_folder(Path(name), options)
        if "kernel" in options.parts:
            results["kernel"] = kernels(Path(name), options)
        if options.parts == ["kernel"]:
            return results
        flags = ["--load-format", "dummy", "--model", name]
        flags += ["--device", options.device, "--context", "2048", "--kv-tokens", str(options.kv_tokens)]
        flags += options.flags
        on = Streams(stack.enter_context(served(flags, None)).url, options.streams, options.prompt)
        await on.open()
        if "loss" in options.parts:
            results["loss"] = await losses(on, options)
        if "beside" in options.parts:
            results["beside"] = await beside(on, options)
        if "jumps" in options.parts:
            url = stack.enter_context(served([*flags, "--no-jump-forward"], None)).url
            off = Streams(url, options.streams, options.prompt)
            await off.open()
            results["jumps"] = await jumps(on, off, options)
            await off.close()
        await on.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=65_536)
    parser.add_argument("--parts", nargs="*", default=["loss", "beside", "jumps"])
    parser.add_argument("--json")
    parser.add_argument("flags", nargs="*", help="of ramify serve, behind --")
    options = parser.parse_args()
    about = machine()
    print(headline(about), flush=True)
    write_json(options.json, about, asyncio.run(measure(options)))


if __name__ == "__main__":
    main()
