"""The bundled models: what `transformers` makes of the very same folders, and their size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from ramify.gpu.startup.load import load_executor
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

GPU = Path(__file__).resolve().parents[3] / "gpu"
FOLDERS = [GPU / "default_model", GPU / "default_draft"]
MIB = 1 << 20
TOKENS = 40
QUESTIONS = ["Hello! Who are you?", "What is 27 + 48?", "Tell me a short story about a fox."]


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_shards_are_small(folder: Path) -> None:
    assert sum(sizes(folder).values()) <= 64 * MIB
    assert max(sizes(folder).values()) <= 15 * MIB


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_greedy_tokens_equal_those_of_transformers(folder: Path) -> None:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    reference, report = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    executor = load_executor(
        ModelConfig(path=folder, device="cpu", kv_tokens=1024, threads=1, quantization="none"),
        lambda what, done: None,
    )
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    try:
        outputs = generate(executor, prompts)
    finally:
        executor.close()
    for prompt, tokens in zip(prompts, outputs, strict=True):
        with torch.inference_mode():  # each token must be the likeliest behind those before it
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()


STORY = """The old lighthouse keeper had lived alone on the island for many years. Every evening he
climbed the narrow stairs and lit the great lamp, and every morning he put it out again and went down to
his breakfast. One winter night a storm came up from the south, and through the noise of the wind
he heard somebody calling. He took his lantern, opened the door, and saw a small boat among the
rocks with two children in it. "Hold on!" he cried, and ran down to the water with a rope. The
waves were high, but the boat was not far away, and at the third throw the boy caught the end of
the rope and made it fast. When they were all sitting by the fire, the girl looked at him and
said: "We saw your light, and we knew that somebody was
there, and so we came."
"""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_8_bit_integers_cost_less_than_half_a_percent_of_the_bits(folder: Path) -> None:
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(STORY).ids
    exact, rounded = (nats(folder, tokens, quantization) for quantization in ("none", "auto"))
    assert rounded < 1.005 * exact


def nats(folder: Path, tokens: list[int], quantization: Any) -> float:
    """Of all tokens but the first."""
    config = ModelConfig(path=folder, device="cpu", kv_tokens=1024, threads=1, quantization=quantization)
    executor = load_executor(config, lambda what, done: None)
    opened = OpenRow(0, 1, pack(range(len(tokens))), 0, SamplingParams(temperature=0.0))
    places, targets = pack(range(len(tokens) - 1)), pack(tokens[1:])
    extend = ExtendRow(0, 0, pack(tokens), False, places, targets)
    result = executor.launch(StepPlan(step=0, opens=[opened], extends=[extend])).result()
    executor.close()
    return -float(np.frombuffer(result.scores, dtype=np.float32).sum())


def generate(executor: Any, prompts: list[list[int]]) -> list[list[int]]:
    """`TOKENS` tokens behind each prompt, all in the same steps."""
    plan, begin = StepPlan(step=0, opens=[], extends=[]), 0
    for row, prompt in enumerate(prompts):
        pages = pack(range(begin, begin := begin + len(prompt) + TOKENS))
        plan.opens.append(OpenRow(row, row + 1, pages, 0, SamplingParams(temperature=0.0)))
        plan.extends.append(ExtendRow(row, 0, pack(prompt), True))
    outputs: list[list[int]] = [[] for _ in prompts]
    rows = pack(range(len(prompts)))
    for step in range(TOKENS):
        result = executor.launch(StepPlan(step=step, decodes=rows) if step else plan).result()
        for row, token in zip(unpack(result.rows), unpack(result.tokens), strict=True):
            outputs[row].append(token)
    executor.launch(StepPlan(step=TOKENS, closes=rows)).result()
    return outputs
