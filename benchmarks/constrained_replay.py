"""Steps that write valid instances of real schemas: with jump-forward, likely words and n-grams.

    python benchmarks/constrained_replay.py --schemas FILE [--count 130]

The model is simulated: it wants the compact JSON of each schema's first valid instance, in the bundled
model's tokens. What must follow, what is likely and what n-grams guess is what the CPU's executor would
run, 32 drafts a step at most. Left out are schemas that are refused or go to llguidance, and instances
in another order than the schema's. Tokens a step of all, the median of the schemas, and lines a step.
"""

import argparse
import json
import statistics
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from constrained import _wanted

from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.vocabulary import vocabulary_of
from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.grammar import GrammarVocabulary
from ramify.gpu.constraints.loads import Loaded, read_vocabulary
from ramify.gpu.constraints.matcher import AutomatonMatcher
from ramify.gpu.constraints.outputs import Output
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.gpu.drafting.ngram import NgramDrafter
from ramify.gpu.startup.drafts import bundled
from ramify.protocol.constraints import (
    AutomatonBody,
    ConstraintSpec,
    VocabularyBody,
    decode_body,
    encode_body,
)
from ramify.protocol.errors import ConstraintError
from ramify.protocol.plan import OpenRow, pack
from ramify.protocol.sampling import SamplingParams

MOST = 32  # drafts of a step
WAYS = {  # likely words, guesses of n-grams
    "jump-forward": (False, 0),
    "and likely words": (True, 0),
    "jump-forward and 8 n-grams": (False, 8),
    "both, 4 n-grams": (True, 4),
    "both, 8 n-grams": (True, 8),
}


def no_threads() -> Executor:
    raise ValueError("masks of this vocabulary take long")


def write(loaded: Loaded, vocabulary: Vocabulary, text: bytes, guesses: int) -> tuple[int, int, int]:
    """Steps, tokens and lines of an output that is `text`. Raises ValueError."""
    future = Future[Loaded]()
    future.set_result(loaded)
    output = Output(future, [], no_threads)
    matcher = output.matcher
    if not isinstance(matcher, AutomatonMatcher):
        raise ValueError("no automaton")
    drafter = NgramDrafter(1)
    drafter.open(OpenRow(0, 0, b"", 0, SamplingParams(), history=pack([1])))

    def guess(behind: Any, most: int) -> list[int]:
        return drafter.continued(0, behind, most)

    steps = tokens = lines = at = 0
    while at < len(text) or not matcher.is_final():
        ahead = output.guess(MOST, guesses, guess, True) if guesses else output.look()
        drafts, sampled = ahead.tokens[:MOST], list[int]()
        steps, lines = steps + 1, lines + 1 + len(drafts)
        for draft in (*drafts, None):
            if at == len(text) and matcher.is_final():
                break
            only = matcher.only()
            token = only if only >= 0 else _wanted(matcher, vocabulary, text, at)
            data = vocabulary.tokens[token]
            if not text.startswith(data, at):
                raise ValueError("another text is forced")
            output.advance([token])
            at += len(data)
            sampled.append(token)
            if token != draft:
                break
        tokens += len(sampled)
        if sampled:
            drafter.observe(np.array([0]), np.array([len(sampled)]), np.array(sampled, dtype=np.int32))
    return steps, tokens, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schemas", type=Path, required=True)
    parser.add_argument("--count", type=int, default=130)
    options = parser.parse_args()
    body = vocabulary_of(bundled("default_model"))
    size = len(msgspec.msgpack.decode(body, type=VocabularyBody).tokens)
    vocabulary = read_vocabulary(body, size)
    grammars = GrammarVocabulary(vocabulary)
    with options.schemas.open() as lines_of:
        found = [json.loads(line) for line in lines_of]
    found = [one for one in found if one["valid"]]
    found = found[:: max(1, len(found) // options.count)][: options.count]
    runs: dict[str, list[tuple[int, int, int]]] = {way: [] for way in WAYS}
    for one in found:
        text = json.dumps(one["valid"][0], separators=(",", ":"), ensure_ascii=False).encode()
        try:
            made = decode_body(
                compile_constraint(ConstraintSpec("json_schema", json.dumps(one["schema"]))).body
            )
            if not isinstance(made, AutomatonBody):
                continue
            own = []
            for likely, guesses in WAYS.values():
                data = encode_body(made if likely else msgspec.structs.replace(made, likely=()))
                constraint = constraint_of(data, vocabulary, lambda: grammars)
                own.append(write(constraint, vocabulary, text, guesses))
        except (ConstraintError, ValueError):
            continue
        for way, run in zip(WAYS, own, strict=True):
            runs[way].append(run)
    for way, each in runs.items():
        steps, tokens, lines = (sum(part) for part in zip(*each, strict=True))
        median = statistics.median(tokens / steps for steps, tokens, _ in each)
        print(
            f"{len(each)} of {len(found)}, {way:28} {tokens} tokens, {steps} steps: "
            f"{tokens / steps:.2f} tokens a step, median {median:.2f}; {lines / steps:.2f} lines"
        )


if __name__ == "__main__":
    main()
