"""The executor on the CPU's kernels: near torch, the same bits however a step is made up, bad logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.executors.base import BadLogits
from ramify.gpu.ops.linear.base import Linear, PlainWeight, Weight
from ramify.protocol.plan import ExtendRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

pytest.importorskip("llvmlite")

from ramify.gpu.native.host import host_isa

pytestmark = pytest.mark.skipif(host_isa() is None, reason="the kernels do not run on this CPU")

PROMPT = [5, 9, 2, 40, 7, 7, 7, 31, 100, 64, 3, 90, 17, 55, 21, 6, 8, 44, 13, 71]
COMMON = {
    "vocab_size": 150,  # not a multiple of a panel
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama-tied": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 192,
        "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "sliding_window": 9,
        "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 9,
        "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 2
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "exaone4": {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window": 9,
        "sliding_window_pattern": "LG",
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 0.5,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8
    },
    "qwen2_moe": {  # a shared expert with a gate
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 20,
        "num_experts_per_tok": 3, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    },
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "num_local_experts": 6,
        "num_experts_per_tok": 2, "logits_scaling": 0.5, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.2,
    },
}  # fmt: skip


def folder(path: Path, family: str) -> Path:
    path.mkdir(exist_ok=True)
    config = COMMON | FAMILIES[family]
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tmp_path: Path, drive: Any) -> Any:
    """A driver of 8-bit weights on a dummy model."""
    family = getattr(request, "param", "llama")
    return drive(folder(tmp_path, family), load_format="dummy", quantization="int8")


def logits(driver: Any, tokens: list[int]) -> torch.Tensor:
    opened = driver.open(0, range(60))
    extend = ExtendRow(0, 0, pack(tokens), True)
    _, found = driver.executor.forward(StepPlan(step=0, opens=[opened], extends=[extend]))
    driver.step(closes=[0])
    return found[0]


class RoundedWeight(Weight):
    """torch's product of weights and activations that were rounded to 8 bits."""

    def __init__(self, linear: Linear) -> None:
        self.rounded = rounded(linear.tensor)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(rounded(x), self.rounded, bias)


def rounded_weight(linear: Linear) -> Weight:
    """Routers stay floats, and torch reads the experts' weights itself."""
    if linear.use == "scores":
        return linear.weight
    return PlainWeight(rounded(linear.tensor)) if linear.stacked else RoundedWeight(linear)


def rounded(x: torch.Tensor) -> torch.Tensor:
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales).round() * scales


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_near_torch_with_rounded_products(
    tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr("ramify.gpu.startup.load.float_weight", rounded_weight)
    where = folder(tmp_path, family)
    torchs = drive(where, load_format="dummy", quantization="none")
    ours = drive(where, load_format="dummy", quantization="int8")
    assert ours.executor.info.quantization == "int8"
    assert ours.executor.info.kv_bytes_per_token == torchs.executor.info.kv_bytes_per_token // 2
    # float16 keys, and what is rounded up here and down there, make the difference
    a, b = logits(torchs, PROMPT), logits(ours, PROMPT)
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.999


@pytest.mark.parametrize("tiny", ["llama", "qwen2_moe"], indirect=True)
def test_prefill_chunks_neighbours_and_decoding_give_the_same_bits(tiny: Any) -> None:
    run, executor = tiny.step, tiny.executor
    opened = tiny.open(0, range(100, 160))
    _, whole = executor.forward(
        StepPlan(step=0, opens=[opened], extends=[ExtendRow(0, 0, pack(PROMPT), True)])
    )
    run(closes=[0])
    # among others, in chunks, on pages in another order
    run(opens=[tiny.open(row, range(200 + 60 * row, 260 + 60 * row)) for row in (1, 2)])
    run(extends=[ExtendRow(row, 0, pack([row] * 30), True) for row in (1, 2)])
    run(
        opens=[tiny.open(3, range(99, 39, -1))],
        extends=[ExtendRow(3, 0, pack(PROMPT[:7]), False)],
        decodes=[1, 2],
    )
    _, chunked = executor.forward(
        StepPlan(step=0, extends=[ExtendRow(3, 7, pack(PROMPT[7:]), True)], decodes=pack([2, 1]))
    )
    assert torch.equal(chunked[0], whole[0])
    # one token at a time
    run(opens=[tiny.open(0, range(160))])
    for at, token in enumerate(PROMPT):
        _, last = executor.forward(
            StepPlan(step=0, extends=[ExtendRow(0, at, pack([token]), True)], decodes=pack([1]))
        )
    assert torch.equal(last[0], whole[0])


def test_sampled_tokens_depend_neither_on_neighbours_nor_on_retraction(tiny: Any) -> None:
    for sampling in (
        SamplingParams(temperature=1.0, seed=99),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=1.2, seed=5),
    ):
        pages = range(60)
        alone = tiny.step(
            opens=[tiny.open(0, pages, sampling=sampling, history=pack(PROMPT))],
            extends=[ExtendRow(0, 0, pack(PROMPT), True)],
        )
        whole = [alone[0], *tiny.decode([0], 15)[0]]
        tiny.step(closes=[0])
        neighbour = tiny.open(1, range(100, 160), sampling=SamplingParams(seed=1))
        tiny.step(opens=[neighbour], extends=[ExtendRow(1, 0, pack([1] * 30), True)])
        tokens = PROMPT + whole[:8]
        resumed = tiny.step(
            opens=[tiny.open(2, range(200, 260), sampling=sampling, sampled=8, history=pack(tokens))],
            extends=[ExtendRow(2, 0, pack(tokens), True)],
            decodes=[1],
        )
        rest = [resumed[2], *tiny.decode([1, 2], 7)[2]]
        assert whole[:8] + rest == whole
        tiny.step(closes=[1, 2])


def test_bad_logits_name_the_request_and_spare_the_others(tiny: Any) -> None:
    wanted = tiny.generate(0, PROMPT, 6, range(30))
    poison = 77
    _, embedding, _ = tiny.executor._layers.instructions[0].keep
    embedding[poison] = torch.nan
    opens = [tiny.open(0, range(200, 230)), tiny.open(7, range(100, 130))]
    extends = [ExtendRow(0, 0, pack(PROMPT), True), ExtendRow(7, 0, pack([3, poison]), True)]
    with pytest.raises(BadLogits, match="request") as caught:
        tiny.executor.launch(StepPlan(step=0, opens=opens, extends=extends)).result()
    assert (caught.value.rows, caught.value.requests) == ([7], [107])
    assert list(unpack(caught.value.result.tokens)) == [wanted[0], -1]
    # its pages are freed, and the bad ones stand behind a short neighbour's keys: nothing leaks over
    tiny.step(closes=[7])
    tiny.step(opens=[tiny.open(8, [100, 2, 101, 4, 102])], extends=[ExtendRow(8, 0, pack([1, 2]), True)],
              decodes=[0])  # fmt: skip
    assert tiny.decode([8, 0], 2)[0] == wanted[2:4]


def test_scores_are_log_probabilities_of_the_logits(tiny: Any) -> None:
    places, targets = [3, 3, 11, 19], [7, 140, 2, 99]
    extend = ExtendRow(0, 0, pack(PROMPT), False, pack(places), pack(targets))
    plan = StepPlan(step=0, opens=[tiny.open(0, range(60))], extends=[extend])
    scores = np.frombuffer(tiny.executor.launch(plan).result().scores, dtype=np.float32)
    tiny.step(closes=[0])
    for place, target, score in zip(places, targets, scores.tolist(), strict=True):
        found = logits(tiny, PROMPT[: place + 1]).log_softmax(-1)[target]
        assert score == pytest.approx(float(found), abs=1e-5)


def test_log_probabilities_of_some_rows(tiny: Any) -> None:
    opens = [
        tiny.open(0, range(30)),
        tiny.open(1, range(30, 60), sampling=SamplingParams(temperature=0.0, logprobs=3)),
    ]
    extends = [ExtendRow(row, 0, pack(PROMPT), True) for row in (0, 1)]
    result = tiny.executor.launch(StepPlan(step=4, opens=opens, extends=extends)).result()
    assert result.logprobs[0] is None
    assert result.logprobs[1].top_ids[0] == unpack(result.tokens)[1] == unpack(result.tokens)[0]
    assert (result.step, result.computed) == (4, 2 * len(PROMPT))


def test_a_step_of_nothing(tiny: Any) -> None:
    tiny.step(opens=[tiny.open(0, range(30))])
    empty = tiny.executor.launch(StepPlan(step=13, closes=pack([0]))).result()
    assert (empty.rows, empty.tokens, empty.computed) == (b"", b"", 0)


@pytest.mark.parametrize("page_size", [4, 32])
def test_pages_of_several_tokens(tmp_path: Path, drive: Any, page_size: int) -> None:
    found = []
    for size in (1, page_size):
        driver = drive(
            folder(tmp_path, "llama"), load_format="dummy", quantization="int8", page_size=size
        )
        found.append(driver.generate(0, PROMPT, 20, driver.pages(3 * page_size, 60)))
        driver.executor.close()
    assert found[0] == found[1]
