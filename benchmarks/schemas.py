"""How much of JSON Schema is served, over real schemas with valid and invalid instances.

    python benchmarks/schemas.py --data ../shared/data/schemas [--limit 10] [--part 0/1] [--json FILE]

Each schema goes three ways, each by itself: to our lowering, which makes an automaton; to llguidance, as
the file holds it; and to the server's route, which chooses. Instances are compact JSON in their own
order of members (`json.dumps` without white space and without escapes that are not needed), and a second
time with the members in the order in which the schema lists them, as constraints write them.

    fully right         every valid instance is accepted, and no invalid one
    invalid accepted    schemas with an invalid instance that is accepted: there must be none

`--data` has a file schemas.jsonl: a record a line with `id`, `schema`, `valid`, `invalid`. Schemas are
compiled in a process of its own, which is ended when one takes longer than `--limit` seconds.
"""

import argparse
import collections
import json
import multiprocessing
import re
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Result = dict[str, Any]
MEMORY = 4 << 30  # bytes of address space


def spelled(value: object) -> bytes:
    """`value` as compact JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def orders(schema: object) -> list[dict[str, int]]:
    """For each `properties` in `schema`: the place of each name."""
    found: list[dict[str, int]] = []
    stack = [schema]
    for at in stack:
        if isinstance(at, dict):
            names = at.get("properties")
            if isinstance(names, dict):
                found.append({name: place for place, name in enumerate(names)})
            stack.extend(at.values())
        elif isinstance(at, list):
            stack.extend(at)
    return found


def ordered(value: Any, listed: list[dict[str, int]]) -> Any:
    """`value` with the members of each object as the `properties` that name most of them list them."""
    if isinstance(value, list):
        return [ordered(inner, listed) for inner in value]
    if not isinstance(value, dict):
        return value
    places = max(listed, key=lambda names: sum(name in names for name in value), default={})
    names = sorted(value, key=lambda name: places.get(name, len(places)))
    return {name: ordered(value[name], listed) for name in names}


def answers(accepts: Callable[[object], bool], record: Result) -> Result:
    """What is accepted of a record's instances: as they are, and (`listed`) in either order."""
    listed = orders(record["schema"])
    found: Result = {name: [accepts(value) for value in record[name]] for name in ("valid", "invalid")}
    again = {
        name: [
            own or accepts(ordered(value, listed))
            for own, value in zip(found[name], record[name], strict=True)
        ]
        for name in ("valid", "invalid")
    }
    return {**found, "listed": again}


def by_lowering(record: Result) -> Result:
    """What our lowering makes of a record."""
    from ramify.actors.grammar.schema.errors import UnsupportedSchema
    from ramify.actors.grammar.schema.lower import lower

    try:
        lowered = lower(record["schema"])
    except UnsupportedSchema as error:
        return {"refused": error.reason, "pointer": error.pointer}
    found = answers(lambda value: lowered.automaton.accepts(spelled(value)), record)
    return {"states": len(lowered.automaton), "notes": lowered.notes, **found}


class _Bytes:
    """A tokenizer whose tokens are the bytes, as llguidance wants one."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = [256]
    tokens = [*(bytes([i]) for i in range(256)), b"<eos>"]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def by_grammar(grammar: str, record: Result) -> Result:
    """What llguidance makes of a grammar."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    first = llguidance.LLMatcher(tokenizer, grammar)
    if first.is_error():
        return {"refused": first.get_error().split("\n")[0][:300], "pointer": ""}

    def accepts(value: object) -> bool:
        matcher = first.deep_copy()
        data = spelled(value)
        return bool(matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting())

    return answers(accepts, record)


def by_llguidance(record: Result) -> Result:
    """What llguidance makes of a record as it is."""
    import llguidance

    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(record["schema"]),
        defaults={"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    )
    return by_grammar(grammar, record)


def by_route(record: Result) -> Result:
    """What the server makes of a record."""
    from ramify.actors.grammar.route import route
    from ramify.gpu.constraints.written import WrittenOutput
    from ramify.protocol.errors import ConstraintError

    try:
        routed = route(record["schema"])
    except ConstraintError as error:
        return {"refused": error.message, "pointer": (error.details or {}).get("pointer", "")}
    if routed.automaton is None:
        assert routed.grammar is not None
        return {"by": "llguidance", "notes": routed.notes, **by_grammar(routed.grammar, record)}
    automaton, places = routed.automaton, routed.places

    def accepts(value: object) -> bool:
        data, written = spelled(value), WrittenOutput(places)
        if not automaton.accepts(data):
            return False
        return not places or written.walk(written.start(), data) is not None

    found = answers(accepts, record)
    return {
        "by": "checked" if places else "lowering",
        "states": len(automaton),
        "notes": routed.notes,
        **found,
    }


BACKENDS = {"lowering": by_lowering, "llguidance": by_llguidance, "route": by_route}


def serve(pipe: Connection) -> None:
    """A process that answers records with results."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while True:
        try:
            name, record = pipe.recv()
        except EOFError:
            return
        start = time.perf_counter()
        try:
            found = BACKENDS[name](record)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        found["ms"] = round((time.perf_counter() - start) * 1e3, 2)
        pipe.send(found)


class CompileWorker:
    """One such process, started again when it was ended."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._pipe, other = self._context.Pipe()
        self._process = self._context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def run(self, name: str, record: Result, limit: float) -> Result:
        """The result of backend `name`, or that it took too long, or died."""
        self._pipe.send((name, record))
        try:
            if self._pipe.poll(limit):
                found: Result = self._pipe.recv()
                return found
            found = {"failed": "too slow"}
        except EOFError:
            found = {"failed": "the process died"}
        self._process.kill()
        self._process.join()
        self._start()
        return found


def right(result: Result) -> bool:
    """Whether a backend got a schema fully right."""
    return "valid" in result and all(result["valid"]) and not any(result["invalid"])


def wrong(result: Result) -> bool:
    """Whether a backend accepts an invalid instance, in either order of members."""
    return any(result.get("listed", {}).get("invalid", ()))


def reason(result: Result) -> str:
    """Why a schema was refused, without what is of this schema only."""
    if "failed" in result:
        return str(result["failed"])[:60]
    keyword = result["pointer"].rpartition("/")[2]
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "_", result["refused"])[:70]
    return f"{keyword}: {text}" if keyword in text or not keyword.isalpha() else f"{text} ({keyword})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of schemas.jsonl")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for one schema (default 10)")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th schema from the I-th on")
    parser.add_argument("--only", help="the id of one schema")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--json", type=Path, help="append a line for each schema here")
    args = parser.parse_args()
    first, step = map(int, args.part.split("/"))
    lines = (args.data / "schemas.jsonl").read_bytes().splitlines()
    records = [json.loads(line) for line in lines][first::step]
    if args.only:
        records = [record for record in records if record["id"] == args.only]
    worker = CompileWorker()
    results: list[Result] = []
    for record in records:
        result: Result = {"id": record["id"]}
        for name in args.backends.split(","):
            result[name] = worker.run(name, record, args.limit)
        results.append(result)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(result) + "\n")
        if len(results) % 200 == 0:
            print(f"{len(results)} of {len(records)}", file=sys.stderr)
    report(results, args.backends.split(","))


def report(results: list[Result], backends: list[str]) -> None:
    """Print the tables."""
    count = len(results)
    for name in backends:
        mine = [result[name] for result in results]
        times = sorted(result["ms"] for result in mine if "ms" in result)
        print(f"\n{name}: of {count} schemas")
        print(f"  compiled          {sum('valid' in r for r in mine)}")
        print(f"  fully right       {sum(map(right, mine))} ({sum(map(right, mine)) / count:.1%})")
        listed = sum(right(r.get("listed", {})) for r in mine)
        print(f"  in listed order   {listed} ({listed / count:.1%})")
        print(f"  invalid accepted  {sum(map(wrong, mine))}")
        print(f"  failed            {sum('failed' in r for r in mine)}")
        if times:
            median, slow = times[len(times) // 2], times[int(len(times) * 0.95)]
            print(f"  median {median} ms, p95 {slow} ms, with the instances")
        by = collections.Counter(r["by"] for r in mine if "by" in r)
        for backend, schemas in by.items():
            sound = sum(right(r) for r in mine if r.get("by") == backend)
            print(f"  by {backend}: {schemas}, fully right {sound}")
        counted = collections.Counter(reason(r) for r in mine if "valid" not in r)
        for text, schemas in counted.most_common(40):
            print(f"  {schemas:5} {text}")


if __name__ == "__main__":
    main()
