"""`select` through the whole server: scores against `transformers`' logits, for the three methods."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from ramify.actors.tokenizer import Tokenizer

METHODS = [
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
]
CHOICES = [
    "Paris",
    "Paris and Spain",  # a choice that another one begins
    "Parisian",
    " Madrid",
    "Äpfel, naïve, café",
    "東京",
    "東京🙂",
    "🙂",
    "one two three four five",
]
PROMPT = "The quick brown fox jumps over the lazy dog.\nCapital of France?" * 2


class Reference:
    """Log-probabilities by `transformers`, and the methods by their definition."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(self, before: Sequence[int], choices: list[list[int]]) -> list[list[float]]:
        """Of each choice's tokens behind `before`; of the very first token of all: 0."""
        found = []
        longest = max(map(len, choices))
        for choice_batch in (choices[i : i + 100] for i in range(0, len(choices), 100)):
            padded = [[*before, *choice, *[0] * (longest - len(choice))] for choice in choice_batch]
            logits = self.model(torch.tensor(padded)).logits.log_softmax(-1)
            for row, choice in zip(logits, choice_batch, strict=True):
                places = range(len(before) - 1, len(before) + len(choice) - 1)
                pairs = zip(places, choice, strict=True)
                found.append([row[place, token].item() if place >= 0 else 0.0 for place, token in pairs])
        return found

    def scores(self, before: Sequence[int], choices: list[list[int]], method: str) -> list[float]:
        rows = self.logprobs(before, choices)
        if method == METHODS[2]:
            alone = self.logprobs([], choices)
            rows = [[a - b for a, b in zip(*two, strict=True)] for two in zip(rows, alone, strict=True)]
        return [sum(row) / len(row) for row in rows]

    def best(self, before: Sequence[int], choices: list[list[int]], method: str) -> int:
        scores = self.scores(before, choices, method)
        if method != METHODS[1]:
            return max(range(len(scores)), key=scores.__getitem__)
        rows = self.logprobs(before, choices)
        longest = max(map(len, rows))
        rows = [row + [sum(row) / len(row)] * (longest - len(row)) for row in rows]
        left = list(range(len(rows)))
        for place in range(longest):
            most = max(rows[i][place] for i in left)
            left = [i for i in left if rows[i][place] > most - 1e-5]
        return left[0]


@pytest.fixture(scope="module")
def reference(llama_folder: Path) -> Reference:
    return Reference(llama_folder)


def llama(folder: Path, **settings: Any) -> dict[str, Any]:
    """Keywords of `serving`."""
    model = {"path": folder, "device": "cpu", "dtype": "float32", "threads": 1, "step_tokens": 64}
    return {"real": True, "model": model | settings}


def joined(encode: Any, text: str, choices: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Prompt and choice as one text: the tokens before the first that differs, and those behind."""
    prompt, wholes = encode(text), [encode(text + choice) for choice in choices]
    at = len(prompt)
    for whole in wholes:
        same = (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b)
        at = min(at, next(same, len(prompt)))
    return prompt[:at], [whole[at:] for whole in wholes]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT + " ", "hello wor", "東"])
async def test_as_by_transformers(
    serving: Any, llama_folder: Path, reference: Reference, method: str, prompt: str
) -> None:
    """Cold, warm, and beside others; the prompt in chunks; with a border that the choices move."""
    choices = [*CHOICES, "ld", "."]
    async with serving(**llama(llama_folder, page_size=4)) as served:
        before, encoded = joined(served.oracle.tokenizer.encode, prompt, choices)
        wanted = reference.scores(before, encoded, method)
        best = reference.best(before, encoded, method)
        async with served.connect() as peer:
            await peer.open(
                {"type": "append", "id": 1, "text": prompt},
                {"type": "fork", "id": 2, "as": ["again", "busy"]},
                {"type": "append", "id": 3, "branch": "busy", "text": " hello" * 40},
                {"type": "select", "id": 4, "choices": choices, "method": method},
                peer.greedy(5, branch="busy", ignore_eos=True),
                tokens=True,
            )
            await peer.terminal(4)
            await peer.send(
                {"type": "select", "id": 6, "branch": "again", "choices": choices, "method": method}
            )
            for ident in (4, 6):
                done = await peer.terminal(ident)
                assert done["type"] == "done", done
                assert done["scores"] == pytest.approx(wanted, abs=1e-4)
                assert (done["choice"], done["text"]) == (best, choices[best])
                assert done["position"] == len(before) + len(encoded[best])
                assert done.get("rebased", len(before)) == len(before)
            tokens = await peer.tree(7)
            assert tokens["main"] == tokens["again"] == [*before, *encoded[best]]
            await peer.terminal(5)


async def test_in_a_conversation(serving: Any, llama_folder: Path, reference: Reference) -> None:
    """Behind the template's prompt; then the conversation goes on."""
    async with serving(**llama(llama_folder)) as served, served.connect() as peer:
        await peer.open(
            peer.user(1, "Capital of France?"),
            {"type": "select", "id": 2, "choices": ["Paris", "Madrid"]},
            peer.user(3, "And Spain?"),
            {"type": "select", "id": 4, "choices": ["Paris", "Madrid"]},
        )
        oracle = served.oracle
        prompt = oracle.turn("Capital of France?")
        encoded = [oracle.tokenizer.encode(choice) for choice in ("Paris", "Madrid")]
        first = await peer.terminal(2)
        assert first["scores"] == pytest.approx(reference.scores(prompt, encoded, METHODS[0]), abs=1e-4)
        prompt = oracle.next_turn([*prompt, *encoded[first["choice"]]], "And Spain?")
        second = await peer.terminal(4)
        assert second["scores"] == pytest.approx(reference.scores(prompt, encoded, METHODS[0]), abs=1e-4)
        assert second["position"] == len(prompt) + len(encoded[second["choice"]])


async def test_a_thousand_choices(serving: Any, llama_folder: Path, reference: Reference) -> None:
    """On default limits, over one socket; every score right, and one prefix computed once."""
    shuffle = random.Random(5)
    words = ["Paris", "Madrid", "one", "two", "three", "東京", "fox", "dog", "naïve", "🙂"]
    choices = [
        " " + " ".join([str(i), *(shuffle.choice(words) for _ in range(shuffle.randrange(4)))])
        for i in range(1000)
    ]
    before, encoded = joined(Tokenizer.load(llama_folder).encode, PROMPT, choices)
    wanted = reference.scores(before, encoded, METHODS[0])
    async with serving(**llama(llama_folder)) as served, served.connect() as peer:
        await peer.open(
            {"type": "append", "id": 1, "text": PROMPT},
            {"type": "select", "id": 2, "choices": choices},
        )
        done = await peer.terminal(2)
        assert done["type"] == "done", done
        assert done["scores"] == pytest.approx(wanted, abs=1e-4)
        assert done["choice"] == max(range(1000), key=wanted.__getitem__)
        own = sum(len(choice) for choice in encoded)
        assert len(before) <= done["usage"]["computed"] <= len(before) + own
        await served.quiet()


@pytest.mark.parametrize("gateways", [0, 2])
async def test_bad_input(serving: Any, llama_folder: Path, gateways: int) -> None:
    """Each names its field; the session goes on."""
    async with serving(gateways=gateways) as served, served.connect() as peer:
        await peer.open({"type": "append", "id": 1, "text": "one"})
        bad = [
            ({"choices": []}, "bad_request", "choices"),
            ({"choices": ["a"] * 1025}, "bad_request", "choices"),
            ({"choices": ["a", ""]}, "bad_request", "choices[1]"),
            ({"choices": ["a" * 65537]}, "bad_request", "choices"),
            ({"choices": ["a"], "method": "best"}, "bad_request", "method"),
            ({"choices": ["a"], "priority": 9}, "bad_request", "priority"),
            ({"choices": ["a"], "deadline_ms": 0}, "bad_request", "deadline_ms"),
            ({"choices": ["a"], "branch": "nope"}, "no_branch", "nope"),
            ({"choices": ["a"], "expect": 99}, "conflict", "position"),
            ({"choices": ["a", "b " * 30000]}, "too_long", "choices[1]"),
        ]
        for ident, (fields, code, words) in enumerate(bad, 2):
            await peer.send({"type": "select", "id": ident, **fields})
            error = await peer.terminal(ident)
            assert (error["type"], error["code"]) == ("error", code), error
            assert words in error["message"]
        await peer.send({"type": "select", "id": 50, "choices": ["a", "b"]})
        assert (await peer.terminal(50))["type"] == "done"
