"""Constrained decoding through a whole engine: jump-forward on and off, and whether every text obeys.

    python benchmarks/constrained_serving.py jump [--schemas FILE] [--count 20] [--drafts ngram model]
    python benchmarks/constrained_serving.py samples [--count 10000]

`jump`: the same requests, greedy, one after the other, without jump-forward, with it, and with each of
`--drafts` beside it, in turn: whether the texts are equal, steps of the model, milliseconds from the
first token to the last (the best of `--repeat`).
`samples`: at temperature 1 from the bundled model and from random weights in its shape; each text that
ended by itself is matched with Python's `re`, or parsed and validated with `jsonschema`.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jsonschema
from prometheus_client import generate_latest

from ramify.actors.engine import Engine, running_engine
from ramify.clients import connect
from ramify.clients.commands.settings import bundled_model
from ramify.clients.handles import Branch
from ramify.protocol.config import EngineConfig, Limits, ModelConfig, ServerConfig
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import Constraint

SHORT = {"type": "string", "pattern": "^[A-Za-z ]{1,16}$"}


def closed(**properties: Any) -> dict[str, Any]:
    """An object of exactly these members."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


CHARACTER = closed(
    name=SHORT,
    house={"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
    blood={"enum": ["pure", "half", "muggle"]},
    occupation={"enum": ["student", "teacher", "auror", "ministry of magic", "death eater"]},
    wand=closed(wood=SHORT, core=SHORT, length={"type": "integer", "minimum": 7, "maximum": 16}),
    alive={"enum": ["Alive", "Deceased"]},
    patronus=SHORT,
    bogart=SHORT,
)
THREE = closed(
    name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}, member={"type": "boolean"}
)
SAMPLED: list[dict[str, Any]] = [
    {"regex": r"[0-9]{3}-[0-9]{4}"},
    {"regex": r"(no|none|nothing at all)"},
    {"regex": r"[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9}){0,2}"},
    {"regex": r"([01][0-9]|2[0-3]):[0-5][0-9]"},
    {"choices": ["yes", "no", "yes and no"]},
    {"json_schema": CHARACTER},
    {"json_schema": THREE},
    {"json_schema": {"enum": [1, 12, "a", None]}},
    {"json_schema": {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]}},
    {"json_schema": {"type": "array", "items": THREE, "minItems": 1, "maxItems": 3}},
]


async def engine_of(options: argparse.Namespace, **settings: Any) -> Any:
    settings = {"draft": "none", "threads": options.threads, **settings}
    model = ModelConfig(path=bundled_model(), **settings)
    server = ServerConfig(port=0)
    limits = Limits(running=64, n=64, branches=4096, ops_per_second=1 << 20, ops_burst=1 << 20)
    return running_engine(EngineConfig(model=model, server=server, limits=limits))


def steps(engine: Engine) -> int:
    """Steps of the model since the start."""
    found = re.search(
        r"^ramify_steps_total (\S+)$", generate_latest(engine.metrics.registry).decode(), re.M
    )
    assert found is not None
    return int(float(found[1]))


# --- jump ---------------------------------------------------------------------------------------


async def write(engine: Engine, branch: Branch, schema: Any, limit: int) -> dict[str, Any]:
    """One answer on a fork of the branch."""
    begun = steps(engine)
    (fork,) = await branch.fork("record")
    try:
        result = await fork.chat(
            "Write down a record.", json_schema=schema, max_tokens=limit, temperature=0.0
        )
    finally:
        await fork.drop()
    return {
        "text": result.text,
        "reason": result.reason,
        "tokens": result.usage.output,
        "forced": result.usage.forced,
        "accepted": result.usage.accepted,
        "steps": steps(engine) - begun,
        "ms": result.usage.total_ms - (result.usage.ttft_ms or 0.0),
    }


async def measure(options: argparse.Namespace, schemas: dict[str, Any]) -> dict[str, list[Any]]:
    """By name: of each way the best of the repetitions."""
    found: dict[str, list[Any]] = {}
    more = {"quantization": options.quantization, "draft_tokens": options.draft_tokens}
    ways = [{"jump_forward": False}, {}, *({"draft": draft} for draft in options.drafts)]
    async with AsyncExitStack() as stack:
        sides = []
        for way in ways:
            engine = await stack.enter_async_context(await engine_of(options, **more, **way))
            session = await stack.enter_async_context(connect(engine.url))
            sides.append((engine, session.main))
        for name, schema in schemas.items():
            runs: list[list[Any]] = [[] for _ in sides]
            try:
                for _ in range(options.repeat):
                    for own, (engine, branch) in zip(runs, sides, strict=True):
                        own.append(await write(engine, branch, schema, options.limit))
            except RamifyError as error:
                print(f"{name}: {error.code}", flush=True)
                continue
            found[name] = [min(own, key=lambda run: run["ms"]) for own in runs]
            tell(name, found[name])
    return found


def tell(name: str, runs: list[Any]) -> None:
    off, *others = runs
    parts = [f"{name[:40]:40} tokens {off['tokens']:4} forced {off['forced']:4}"]
    parts.append(f"steps {off['steps']:4} ms {off['ms']:7.1f}")
    for on in others:
        equal = "equal" if on["text"] == off["text"] else "UNLIKE"
        parts.append(f"{equal} {on['steps']:4} {on['ms']:7.1f} accepted {on['accepted']:3}")
    print(" | ".join(parts), flush=True)


async def jump(options: argparse.Namespace) -> None:
    schemas: dict[str, Any] = {"character": CHARACTER, "three fields": THREE}
    if options.schemas is not None:
        lines = options.schemas.read_text().splitlines()
        rows = [json.loads(line) for line in lines[:: max(1, len(lines) // (2 * options.count))]]
        objects = [row for row in rows if row["schema"].get("type") == "object"]
        schemas |= {row["id"]: row["schema"] for row in objects[: options.count]}
    ways = ["jump-forward", *(f"and {draft}" for draft in options.drafts)]
    found = await measure(options, schemas)
    print(f"load {os.getloadavg()[0]:.1f}; times as many steps, and ms, without anything")
    real = {name: runs for name, runs in found.items() if "/" in name}
    for what, some in (("character", found), ("three fields", found), ("real", real)):
        chosen = list(real.values()) if what == "real" else [some[what]]
        for number, way in enumerate(ways, 1):
            if not chosen:
                continue
            ratios = [sum(runs[0][key] for runs in chosen) / sum(runs[number][key] for runs in chosen)
                      for key in ("steps", "ms")]  # fmt: skip
            each = statistics.median(runs[0]["steps"] / runs[number]["steps"] for runs in chosen)
            unlike = sum(runs[0]["text"] != runs[number]["text"] for runs in chosen)
            print(f"{what} ({len(chosen)}), {way}: steps {ratios[0]:.2f} (median {each:.2f}), "
                  f"ms {ratios[1]:.2f}, {unlike} unlike")  # fmt: skip


# --- samples ------------------------------------------------------------------------------------


def obeys(given: dict[str, Any], text: str) -> bool:
    if "regex" in given:
        return re.fullmatch(given["regex"], text, re.A) is not None
    if "choices" in given:
        return text in given["choices"]
    try:
        jsonschema.validate(json.loads(text), given["json_schema"])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def samples(options: argparse.Namespace) -> None:
    each = -(-options.count // (2 * len(SAMPLED)))
    for weights in ("auto", "dummy"):
        good = cut = bad = 0
        async with (
            await engine_of(options, load_format=weights) as engine,
            connect(engine.url) as session,
        ):
            await session.main.append("A record: ")
            for given in SAMPLED:
                constraint = Constraint(**given)
                for begin in range(0, each, 64):
                    count = min(64, each - begin)
                    running = session.main.generate(
                        n=count, constraint=constraint, temperature=1.0, seed=begin, max_tokens=400
                    )
                    for one in running:
                        result = await one
                        if result.reason != "stop":
                            cut += 1
                        elif obeys(given, result.text):
                            good += 1
                        else:
                            bad += 1
                            print("DOES NOT OBEY", given, repr(result.text))
                    for one in running:
                        await session.branch(one.branch).drop()
        print(f"weights {weights}: {good} obey, {bad} do not, {cut} were cut at 400 tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["jump", "samples"])
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--drafts", nargs="*", default=[])
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    asyncio.run(jump(options) if options.what == "jump" else samples(options))


if __name__ == "__main__":
    main()
