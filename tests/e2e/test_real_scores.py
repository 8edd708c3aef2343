"""How likely texts are, over HTTP and WebSocket: a real (tiny, random, float32) Llama.

As evaluation harnesses ask it (`echo`, `max_tokens` 0, `logprobs` k), and as `append` with `logprobs`
answers it. However the server comes to the numbers (in chunks, beside others, behind KV that is cached,
on a branch), they are those of one forward pass of `transformers` over the whole text.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

CLOSE = 1e-4
STEP = 48  # tokens of a step: longer texts are computed in chunks
TOP = 5
TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Once upon a time",
    "Äpfel, naïve, café, 東京, 🙂 and so on.",
    "The quick brown fox jumps over the lazy cat. And Spain? Madrid.",  # begins as the first one
    "a",
]

Reference = Callable[[Sequence[int]], torch.Tensor]


@pytest.fixture(scope="module")
def reference(llama_folder: Path) -> Reference:
    """Log-probabilities of the token behind each but the last one, [tokens - 1, vocabulary]."""
    model = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()

    def logprobs(tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0, :-1].log_softmax(-1)
        return found

    return logprobs


def llama(folder: Path, **settings: Any) -> dict[str, Any]:
    """Keywords of `serving`."""
    model = {"path": folder, "device": "cpu", "dtype": "float32", "threads": 1, "step_tokens": STEP}
    return {"real": True, "model": model | settings}


def compare(
    tokens: Sequence[int], scores: Sequence[float | None], top: Sequence[Any], wanted: torch.Tensor
) -> None:
    """`scores`, `top`: of the last tokens of `tokens`; `top` has the values of the likeliest ones."""
    first = len(tokens) - len(scores)
    rows = [None, *wanted][first:]
    for token, score, likely, row in zip(tokens[first:], scores, top, rows, strict=True):
        if row is None:
            assert score is None  # nothing stands before it
            assert not likely
            continue
        assert score == pytest.approx(float(row[token]), abs=CLOSE)
        assert list(likely) == pytest.approx(row.topk(TOP).values.tolist(), abs=CLOSE)


def compare_choices(choices: Sequence[Any], prompts: Sequence[list[int]], reference: Reference) -> None:
    assert len(choices) == len(prompts)
    for choice, tokens in zip(choices, prompts, strict=True):
        found = choice.logprobs
        assert choice.finish_reason == "length"
        top = [list(each.values()) if each else None for each in found.top_logprobs]
        assert len(found.tokens) == len(found.text_offset) == len(tokens)
        compare(tokens, found.token_logprobs, top, reference(tokens))


@pytest.mark.parametrize("form", ["tokens", "text"])
async def test_echoed_prompts(
    serving: Any, openai_of: Any, executor: str, llama_folder: Path, reference: Reference, form: str
) -> None:
    """Several in one request, twice: the second time all of them are cached."""
    async with (
        serving(executor=executor, **llama(llama_folder)) as served,
        openai_of(served) as (client, model),
    ):
        tokens = [served.oracle.tokenizer.encode(text) for text in TEXTS]
        assert len(tokens[0]) > 3 * STEP
        prompts = tokens if form == "tokens" else TEXTS
        for _ in range(2):
            answer = await client.completions.create(
                model=model, prompt=prompts, max_tokens=0, echo=True, logprobs=TOP
            )
            assert [choice.text for choice in answer.choices] == TEXTS
            assert answer.usage.prompt_tokens == sum(map(len, tokens))
            assert answer.usage.completion_tokens == 0
            compare_choices(answer.choices, tokens, reference)


async def test_an_echo_behind_what_others_left_in_the_cache(
    serving: Any, openai_of: Any, llama_folder: Path, reference: Reference
) -> None:
    """Prefixes of every kind of length, then the whole text, while another client generates."""
    async with serving(**llama(llama_folder)) as served, openai_of(served) as (client, model):
        whole = served.oracle.tokenizer.encode(TEXTS[0])
        settings: dict[str, Any] = {"model": model, "temperature": 0}
        for length in (1, 2, STEP - 1, STEP, STEP + 1, len(whole) - 1):
            await client.completions.create(**settings, prompt=whole[:length], max_tokens=1)
            other = client.completions.create(**settings, prompt=TEXTS[2], max_tokens=20)
            echoed = client.completions.create(
                **settings, prompt=[whole, whole[: length + 1]], max_tokens=0, echo=True, logprobs=TOP
            )
            answer, _ = await asyncio.gather(echoed, other)
            compare_choices(answer.choices, [whole, whole[: length + 1]], reference)


async def test_appends_on_a_branch(serving: Any, llama_folder: Path, reference: Reference) -> None:
    """`append` with `logprobs`: on an empty branch, behind KV, behind a fork, a rollback, an answer."""
    async with serving(**llama(llama_folder)) as served, served.connect() as peer:
        encode = served.oracle.tokenizer.encode
        await peer.open(tokens=True)
        held: list[int] = []

        async def append(ident: int, **fields: Any) -> list[int]:
            """The branch's tokens behind it."""
            await peer.send({"type": "append", "id": ident, "logprobs": TOP, **fields})
            reply = await peer.terminal(ident)
            found = reply["result"]["logprobs"]
            whole = [*held, *(each["token"] for each in found)]
            assert reply["position"] == len(whole)
            top = [[value for _, value in each.get("top", ())] for each in found]
            compare(whole, [each["logprob"] for each in found], top, reference(whole))
            return whole

        held = await append(1, text=TEXTS[0])
        assert held == encode(TEXTS[0])
        fork = {"type": "fork", "id": 2, "as": ["middle"], "at": STEP + 5}
        await peer.send(fork, peer.greedy(3, max_tokens=7))
        await peer.terminal(3)
        before, held = held, held + peer.tokens["main"]
        held = await append(4, tokens=encode(TEXTS[2]))
        held = before[: STEP + 5]
        await append(5, branch="middle", text=" And Spain?")
        await peer.send({"type": "rollback", "id": 6, "to": len(before) - 3})
        await peer.terminal(6)
        held = before[:-3]
        await append(7, messages=[{"role": "user", "content": "Capital of France?"}])
