"""Families with latent attention, against `transformers`, through the executor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.attention import torch_latent
from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.models.config import parse_config
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack
from tests.amount import stride
from tests.gpu.models.families.test_families import SMALL, TOWER, assert_greedy, prompts, rope

SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
YARN = rope(
    "yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9,
    beta_fast=32.0, beta_slow=1.0,
)  # fmt: skip
STEEP = rope(  # as Kimi K2's: without a ramp
    "yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0,
    beta_fast=1.0, beta_slow=1.0,
)  # fmt: skip
ONE_GROUP = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", SIZES | YARN),  # as V2-Lite: no latents of queries
    "deepseek_v2-groups": (
        "DeepseekV2",
        SIZES | GROUPS | {"q_lora_rank": 24, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3", SIZES | GROUPS | YARN | {"q_lora_rank": 24, "attention_bias": True}),
    "deepseek_v3-halves": ("DeepseekV3", SIZES | GROUPS | {"rope_interleave": False}),
    "kimi_k2": ("DeepseekV3", SIZES | ONE_GROUP | STEEP | {"q_lora_rank": 24}),
    "glm4_moe_lite": ("Glm4MoeLite", SIZES | {"q_lora_rank": 24, "v_head_dim": 32}),
    "mistral4": (
        "Mistral4",
        SIZES
        | {"q_lora_rank": 24, "first_k_dense_replace": 0, "n_group": 1}
        | rope(
            "yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
    ),
}  # fmt: skip


def save(folder: Path, case: str, **more: Any) -> Any:
    """A random model, saved and returned."""
    import transformers

    family, changes = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**(SMALL | {"pad_token_id": 0} | changes | more))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("norm.weight", ".bias")):
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
        elif name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(weight, 0.0, 0.3)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj", "gate.weight")):
            torch.nn.init.normal_(weight, 0.0, 0.2)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def log_probabilities(model: Any, prompt: list[int]) -> torch.Tensor:
    return torch.as_tensor(model(torch.tensor([prompt])).logits[0].log_softmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_transformers(case: str, tmp_path: Path, drive: Any) -> None:
    """Alone, batched, in chunks, and where another row begins in the middle."""
    model = save(tmp_path, case)
    first, second, third = prompts()
    every = log_probabilities(model, first)
    for page_size in (1, 16):
        d = drive(tmp_path, page_size=page_size)
        opened = d.open(0, d.pages(1024, 192))
        for start, stop in ((0, 30), (30, 31), (31, 57)):
            ours = d.forward(
                opens=[opened] if start == 0 else [],
                extends=[ExtendRow(0, start, pack(first[start:stop]), True)],
            )
            torch.testing.assert_close(ours[0].log_softmax(-1), every[stop - 1], atol=1e-4, rtol=0)
        d.step(closes=[0])
        assert_greedy(model, first, d.generate(0, first, 24, d.pages(1024, 192)), 24)
        tokens = d.step(
            opens=[d.open(0, d.pages(0, 192)), d.open(1, d.pages(1536, 192))],
            extends=[ExtendRow(0, 0, pack(first), True), ExtendRow(1, 0, pack(second), True)],
        )
        found = {row: [token] for row, token in tokens.items()}
        joined = d.step(
            opens=[d.open(2, d.pages(2048, 192))],
            extends=[ExtendRow(2, 0, pack(third), True)],
            decodes=[1, 0],
        )
        for row, token in joined.items():
            found.setdefault(row, []).append(token)
        for row, rest in d.decode([2, 0, 1], 23).items():
            found[row] += rest
        for row, prompt in enumerate((first, second, third)):
            assert_greedy(model, prompt, found[row][:24], 24)


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "mistral4"])
def test_chunks_of_every_size(
    case: str, expands: bool, tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absorbed, and with keys that are made first, a few of the prefix at a time."""
    monkeypatch.setattr(LatentHeads, "pays_to_expand", lambda *counts: expands)
    monkeypatch.setattr(torch_latent, "_STRETCH", 7)
    model = save(tmp_path, case)
    prompt = prompts()[0][:32]
    wanted = log_probabilities(model, prompt)[-1]
    d = drive(tmp_path, page_size=4)
    for size in range(1, len(prompt) + 1, stride(3)):
        opens = [d.open(0, [*d.pages(64, 16), *d.pages(0, 32)])]  # not side by side
        starts = range(0, len(prompt), size)
        for start in starts[:-1]:
            d.step(opens=opens, extends=[ExtendRow(0, start, pack(prompt[start : start + size]), False)])
            opens = []
        ours = d.forward(
            opens=opens, extends=[ExtendRow(0, starts[-1], pack(prompt[starts[-1] :]), True)]
        )
        torch.testing.assert_close(ours[0].log_softmax(-1), wanted, atol=1e-4, rtol=0)
        d.step(closes=[0])


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3"])
def test_forks_read_one_prefix_and_a_rollback_goes_on(case: str, tmp_path: Path, drive: Any) -> None:
    """Pages of the prefix in three rows; then one row anew from inside what it had, over old pages."""
    model = save(tmp_path, case)
    prefix, tails = prompts()[2][:64], [prompts()[0][:9], prompts()[1][:17], prompts()[0][3:4]]
    d = drive(tmp_path, page_size=16)
    shared = d.pages(2048, 64)
    d.step(opens=[d.open(5, shared)])
    d.prefill(5, 0, prefix, sample=False)
    d.step(closes=[5])
    before = d.executor.counters.tokens
    first = d.step(
        opens=[d.open(row, shared + d.pages(256 * row, 96), cached=64) for row in range(3)],
        extends=[ExtendRow(row, 64, pack(tail), True) for row, tail in enumerate(tails)],
    )
    assert d.executor.counters.tokens - before == sum(map(len, tails))
    rest = d.decode([2, 0, 1], 15)
    for row, tail in enumerate(tails):
        assert_greedy(model, prefix + tail, [first[row], *rest[row]], 16)
    d.step(closes=[1])
    back = d.step(
        opens=[d.open(1, shared + d.pages(256, 96), cached=64)],
        extends=[ExtendRow(1, 64, pack(tails[0]), True)],
    )
    assert_greedy(model, prefix + tails[0], [back[1], *d.decode([1], 15)[1]], 16)


def test_the_text_of_mistral_small_4_with_its_tower(tmp_path: Path, drive: Any) -> None:
    import transformers

    torch.manual_seed(7)
    text = transformers.Mistral4Config(**(SMALL | {"pad_token_id": 0} | CASES["mistral4"][1]))
    tower = TOWER | {"model_type": "pixtral", "head_dim": 16}
    whole = transformers.Mistral3Config(
        text_config=text.to_dict(), vision_config=tower, tie_word_embeddings=False
    )
    model = transformers.Mistral3ForConditionalGeneration(whole).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj", "gate.weight")):
            torch.nn.init.normal_(weight, 0.0, 0.2)
    model.save_pretrained(tmp_path)
    prompt = prompts()[0]
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    d = drive(tmp_path)
    opened = d.open(0, d.pages(0, 64))
    ours = d.forward(opens=[opened], extends=[ExtendRow(0, 0, pack(prompt), True)])
    torch.testing.assert_close(ours[0], wanted, atol=1e-4, rtol=1e-4)


V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
}


def test_tokens_in_20_gib() -> None:
    """Of V2-Lite's shape, in bfloat16, against keys and values of each head."""
    shape = parse_config(V2_LITE, {}, Path("config.json"))
    latent = shape.kv_layout(torch.bfloat16).bytes_per_token
    assert latent == 27 * (512 + 64) * 2
    expanded = 27 * 16 * (128 + 64 + 128) * 2
    room = 20 << 30
    assert room // latent > 690_000
    assert room // latent > 8.8 * (room // expanded)
    # as engines keep it that pad values to the size of keys, so that one kernel serves
    assert room // latent > 9 * (room // (27 * 16 * 2 * (128 + 64) * 2))


def test_expanding_pays_from_171_queries_on_with_deepseeks_sizes() -> None:
    heads = LatentHeads(torch.empty(1, 256, 512, device="meta"), 128, AttentionSpec(1.0))
    pays = [heads.pays_to_expand(n, 1 << 20, 64) for n in (1, 170, 171, 4096)]
    assert pays == [False, False, True, True]
    assert heads.pays_to_expand(2048, 2048, 64)


@pytest.mark.parametrize(
    ("case", "field", "value", "told"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc", "topk_method"),
        ("deepseek_v2", "norm_topk_prob", True, "norm_topk_prob"),
        ("deepseek_v2", "moe_layer_freq", 2, "moe_layer_freq"),
        ("deepseek_v2", "attention_bias", True, "attention_bias"),
        ("deepseek_v2", "num_key_value_heads", 2, "num_key_value_heads"),
        ("deepseek_v3", "scoring_func", "softmax", "scoring_func"),
        ("deepseek_v3", "qk_rope_head_dim", 15, "qk_rope_head_dim"),
        ("glm4_moe_lite", "mlp_layer_types", ["dense"], "mlp_layer_types"),
        ("glm4_moe_lite", "mlp_layer_types", [[], [], []], "mlp_layer_types"),
        ("deepseek_v3", "rope_parameters", {"rope_type": "yarn", "factor": "four", "mscale_all_dim": 1},
         "factor"),
        ("deepseek_v3", "rope_parameters", {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": [1]},
         "mscale_all_dim"),
        ("mistral4", "rope_parameters", {"llama_4_scaling_beta": "much"}, "llama_4_scaling_beta"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be(case: str, field: str, value: Any, told: str) -> None:
    family, changes = CASES[case]
    raw = SMALL | changes | {"architectures": [f"{family}ForCausalLM"], field: value}
    with pytest.raises(ModelError, match=told):
        parse_config(json.loads(json.dumps(raw)), {}, Path("config.json"))


def test_8_bits_are_refused(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "deepseek_v3", first_k_dense_replace=3)  # dense, so that experts are no reason
    with pytest.raises(ModelError, match="latent attention has no kernels in 8 bits"):
        drive(tmp_path, quantization="int8")


# experts in the last layer of one case: they have kernels and tests of their own
KERNELS = {"device": "cpu", "max_rows": 4, "step_tokens": 32, "kv_tokens": 256}
TWO_LAYERS = {"num_hidden_layers": 2}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: garbage in padding
@pytest.mark.parametrize(
    ("case", "deterministic"), [("deepseek_v2", False), ("deepseek_v3", True), ("mistral4", False)]
)
def test_on_the_kernels(
    case: str, deterministic: bool, tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted: a prompt in chunks, beside decodes, and a second row on the same pages.

    Where the batch may matter, a chunk's keys are made 16 at a time, and the parts are merged.
    """
    pytest.importorskip("triton", minversion="3.7")
    from ramify.gpu.attention import triton_expanded

    begins: list[int] = []
    launch = triton_expanded.TritonLatent.launch
    monkeypatch.setattr(triton_expanded, "_WORKSPACE", 0)
    monkeypatch.setattr(
        triton_expanded.TritonLatent, "launch", lambda *args: (begins.append(args[-2]), launch(*args))
    )
    dense = {} if case == "deepseek_v2" else {"first_k_dense_replace": 2}
    model = save(tmp_path, case, **TWO_LAYERS, **dense)
    prompt = prompts()[0][:40]
    every = log_probabilities(model, prompt)
    attention = "auto" if deterministic else "triton"
    d = drive(tmp_path, attention=attention, deterministic=deterministic, **KERNELS)
    opened = d.open(0, d.pages(0, 64))
    for start, stop in ((0, 9), (9, 10), (10, 37)):
        ours = d.forward(
            opens=[opened] if start == 0 else [],
            extends=[ExtendRow(0, start, pack(prompt[start:stop]), True)],
        )
        torch.testing.assert_close(ours[0].log_softmax(-1), every[stop - 1], atol=1e-4, rtol=0)
    first = d.prefill(0, 37, prompt[37:])[0]
    assert first == int(every[-1].argmax())
    beside = d.step(
        opens=[d.open(1, [*d.pages(0, 32), *d.pages(128, 32)], cached=32)],
        extends=[ExtendRow(1, 32, pack(prompt[32:]), True)],
        decodes=[0],
    )
    rest = d.decode([1, 0], 3)
    assert_greedy(model, prompt, [first, beside[0], *rest[0]], 5)
    assert [beside[1], *rest[1]] == [first, beside[0], *rest[0]][:4]
    assert set(begins) == (set() if deterministic else {0, 16, 32})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's: garbage in padding
@pytest.mark.usefixtures("ordered_dots")
def test_deterministic_alone_batched_and_after_a_hit(tmp_path: Path, drive: Any) -> None:
    """Bit for bit, with experts."""
    pytest.importorskip("triton", minversion="3.7")
    few = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    save(tmp_path, "deepseek_v2", num_hidden_layers=1, first_k_dense_replace=0, **few)
    prompt, other = prompts()[0][:14], prompts()[1][:3]
    d = drive(tmp_path, deterministic=True, **KERNELS)
    whole = ExtendRow(0, 0, pack(prompt), True)
    alone = d.forward(opens=[d.open(0, d.pages(0, 32))], extends=[whole])[0].clone()
    cut = [d.open(1, d.pages(64, 32)), d.open(2, d.pages(128, 32))]
    d.step(opens=cut, extends=[ExtendRow(1, 0, pack(prompt[:9]), False)])
    first, last = ExtendRow(2, 0, pack(other), True), ExtendRow(1, 9, pack(prompt[9:]), True)
    batched = d.forward(extends=[first, last])
    assert torch.equal(batched[1], alone)
    shared = [*d.pages(64, 13), *d.pages(192, 16)]
    hit = d.forward(
        opens=[d.open(3, shared, cached=13)], extends=[ExtendRow(3, 13, pack(prompt[13:]), True)]
    )
    assert torch.equal(hit[0], alone)
