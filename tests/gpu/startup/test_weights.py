"""Broken checkpoints: each fault gets a ModelError that names the file, the tensor and the mend."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.gpu.models.config import parse_config, read_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.definition import Definition
from ramify.gpu.ops.linear.onednn import float_weight
from ramify.gpu.startup.forecast import forecast
from ramify.gpu.startup.load import load_executor
from ramify.gpu.startup.packing import Packing
from ramify.gpu.startup.random_weights import fill_random
from ramify.gpu.startup.weights import load_weights
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExecutorInfo


def load(folder: Path, **settings: Any) -> ExecutorInfo:
    settings = {"device": "cpu", "kv_tokens": 256} | settings
    return load_executor(ModelConfig(path=folder, **settings), lambda what, share: None).info


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    """A checkpoint of one file, made by hand."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    hidden, wide = 32, 48
    tensors = {
        "model.embed_tokens.weight": torch.randn(128, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(128, hidden),
    }
    for i in range(2):
        prefix = f"model.layers.{i}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": torch.randn(hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": torch.randn(16, hidden),
            f"{prefix}.self_attn.v_proj.weight": torch.randn(16, hidden),
            f"{prefix}.self_attn.o_proj.weight": torch.randn(hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": torch.randn(wide, hidden),
            f"{prefix}.mlp.up_proj.weight": torch.randn(wide, hidden),
            f"{prefix}.mlp.down_proj.weight": torch.randn(hidden, wide),
        }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_info_and_progress(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    seen: list[tuple[str, float]] = []
    config = ModelConfig(
        path=checkpoint, device="cpu", kv_tokens=100, page_size=16, name="tiny", context=64
    )
    info = load_executor(config, lambda what, share: seen.append((what, share))).info
    assert (info.model, info.architecture) == ("tiny", "LlamaForCausalLM")
    assert (info.pages, info.page_size, info.context) == (6, 16, 64)
    assert info.eos_token_ids == [7, 2]
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert info.parameters == sum(
        t.numel() for t in load_file(checkpoint / "model.safetensors").values()
    )
    head = info.vocab_size * 32
    assert info.logits_cost == pytest.approx(head / (info.parameters - 2 * head))
    assert any("model.safetensors" in what for what, _ in seen)
    assert seen[-1] == ("ready", 1.0)
    assert all(0 <= share <= 1 for _, share in seen)


def test_a_context_longer_than_the_pool_is_cut(checkpoint: Path) -> None:
    assert load(checkpoint, kv_tokens=64).context == 64


def test_dummy_needs_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert load(checkpoint, load_format="dummy").parameters > 0


def test_dummy_weights_are_seeded() -> None:
    first, second = ({"a.weight": torch.empty(64, 64), "norm.weight": torch.empty(8)} for _ in range(2))
    fill_random(first)
    fill_random(second)
    assert torch.equal(first["a.weight"], second["a.weight"])
    assert float(first["a.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert (first["norm.weight"] == 1).all()
    other = {"of another rank": torch.empty(9), "a.weight": torch.empty(64, 64)}
    fill_random(other)
    assert torch.equal(first["a.weight"], other["a.weight"])
    assert not torch.equal(first["a.weight"].view(-1)[:9], other["of another rank"])


def test_the_bare_models_names_are_known(checkpoint: Path) -> None:
    change(checkpoint, lambda t: [t.__setitem__(k.removeprefix("model."), t.pop(k)) for k in list(t)])
    load(checkpoint)


def test_tensors_that_carry_nothing_are_ignored(checkpoint: Path) -> None:
    configure(checkpoint, tie_word_embeddings=True)
    change(
        checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
    load(checkpoint)


def refused(folder: Path, *words: str, **settings: Any) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder, **settings)
    for word in words:
        assert word in caught.value.message


def refused_by_both(folder: Path, *words: str) -> None:
    """By `ramify info` as well, which reads no weights."""
    refused(folder, *words)
    with pytest.raises(ModelError) as caught:
        forecast(folder)
    assert all(word in caught.value.message for word in words)


def test_missing_tensor(checkpoint: Path) -> None:
    forecast(checkpoint)
    change(checkpoint, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused_by_both(checkpoint, "1 tensor(s)", "model.layers.1.mlp.up_proj.weight")


def test_wrong_shape(checkpoint: Path) -> None:
    change(checkpoint, lambda t: t.update({"lm_head.weight": torch.zeros(4, 32)}))
    refused_by_both(checkpoint, "model.safetensors", "lm_head.weight", "[4, 32]", "[128, 32]")


def test_wrong_type(checkpoint: Path) -> None:
    change(checkpoint, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))
    refused_by_both(checkpoint, "model.norm.weight", "int8")


def test_a_tensor_without_a_place(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    change(checkpoint, lambda t: t.update({name: torch.zeros(32)}))
    refused_by_both(checkpoint, name, "no place")


def test_truncated_file(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused_by_both(checkpoint, "model.safetensors", "cut short")
    path.write_bytes(b"")
    refused(checkpoint, "model.safetensors")


def test_missing_shard_and_broken_index(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    refused(checkpoint, "model-00002-of-00002.safetensors", "missing")
    for text in ("{", "[]", '{"weight_map": {}}', '{"weight_map": [1]}'):
        index.write_text(text)
        refused(checkpoint, "model.safetensors.index.json", "again")
    for name in (1, "../other/model.safetensors", "/model.safetensors", "x" * 10**5):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        refused(checkpoint, "model.safetensors.index.json", "names the shard", "again")
    index.write_text("[" * 10**5)
    refused(checkpoint, "model.safetensors.index.json", "again")


def test_no_weights(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.rename(checkpoint / "other.safetensors")
    refused(checkpoint, "other.safetensors", "index")
    (checkpoint / "other.safetensors").unlink()
    refused(checkpoint, "holds no weights")
    (checkpoint / "pytorch_model.bin").write_bytes(b"x")
    refused(checkpoint, "safetensors", ".bin")


def test_no_folder_no_config(tmp_path: Path) -> None:
    refused(tmp_path, "config.json", "missing")
    refused(tmp_path / "nothing", "not a folder")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json", "cannot be read")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "config.json", "not a JSON object")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": "gpt2"}, ["gpt2", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"num_local_experts": 8}, ["num_local_experts", "LlamaForCausalLM"]),
        ({"layer_types": ["sliding_attention"] * 2}, ["layer_types", "full_attention"]),
        ({"num_hidden_layers": 1 << 40}, ["num_hidden_layers", "1024"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq", "quantization_config"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", "3"]),
        ({"head_dim": 7}, ["head_dim"]),
        ({"vocab_size": "x"}, ["vocab_size"]),
        ({"hidden_size": 0}, ["hidden_size"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_scaling": {"type": "magic"}}, ["magic", "yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, ["yarn"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1], "short_factor": [1]}},
            ["longrope", "1 factors for 4"],
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["layer type"]),
    ],
)
def test_a_config_that_cannot_be_served(
    checkpoint: Path, fields: dict[str, Any], words: list[str]
) -> None:
    configure(checkpoint, **fields)
    refused(checkpoint, "config.json", *words)


def test_windows_of_layers(tiny_config: dict[str, Any]) -> None:
    qwen = tiny_config | {
        "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 8,
        "use_sliding_window": True, "max_window_layers": 2,
    }  # fmt: skip

    def windows(config: Definition) -> tuple[int | None, ...]:
        return tuple(layer.mixer.spec.window for layer in config.layers)

    assert windows(parse_config(qwen, {}, Path("config.json"))) == (None, None, 8)
    listed = qwen | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert windows(parse_config(listed, {}, Path("config.json"))) == (8, None, 8)
    assert windows(parse_config(qwen | {"use_sliding_window": False}, {}, Path("c"))) == (None,) * 3
    with pytest.raises(ModelError, match="layer_types"):
        parse_config(qwen | {"layer_types": ["other"] * 3}, {}, Path("config.json"))
    with pytest.raises(ModelError, match="sliding_window"):
        parse_config(qwen | {"sliding_window": -1}, {}, Path("config.json"))


def test_a_pool_that_does_not_fit(checkpoint: Path) -> None:
    refused(checkpoint, "--kv-tokens", "give at most", kv_tokens=1 << 40)


def full(*arguments: Any) -> None:
    raise torch.OutOfMemoryError("what torch says")


def test_weights_that_do_not_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.gpu.startup.load.Decoder", full)
    refused(checkpoint, "the weights do not fit", "smaller model")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a small version, for the interpreter")
def test_steps_that_do_not_fit(
    checkpoint: Path, tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", minversion="3.7")
    from ramify.gpu.executors.cuda_executor import CudaExecutor

    (checkpoint / "config.json").write_text(json.dumps(tiny_config | {"head_dim": 16}))
    settings: dict[str, Any] = {"attention": "triton", "load_format": "dummy", "max_rows": 3}
    monkeypatch.setattr(CudaExecutor, "capture", full)
    refused(checkpoint, "KV cache of 256 tokens", "--kv-fraction", **settings)
    monkeypatch.setattr("ramify.gpu.startup.rehearsal.rehearse", full)
    refused(checkpoint, "the largest step", "lower --max-rows", **settings)


def test_a_context_beyond_the_models(checkpoint: Path) -> None:
    refused(checkpoint, "--context 300", "256", context=300)
    configure(checkpoint, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert load(checkpoint, context=300, kv_tokens=512).context == 300


def scaled(kind: str, factor: float | None, original: int | None, stated: int) -> dict[str, Any]:
    fields = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    scaling = {name: value for name, value in fields.items() if value is not None}
    return {"max_position_embeddings": stated, "rope_scaling": scaling}


@pytest.mark.parametrize(
    ("kind", "factor", "original", "stated", "context", "longest"),
    [
        ("yarn", 4.0, 32768, 32768, 131072, 131072),  # Qwen2.5's documentation
        ("yarn", 4.0, 32768, 40960, 131072, 131072),  # Qwen3's
        ("yarn", 4.0, 32768, 131072, 131072, 131072),  # counted in already
        ("yarn", 2.0, None, 4096, 8192, 8192),
        ("linear", 4.0, None, 4096, 4096, 16384),
        ("dynamic", 2.0, None, 4096, 4096, None),
        ("llama3", 8.0, 8192, 131072, 131072, 131072),
        ("longrope", None, 4096, 131072, 131072, 131072),
        ("default", None, None, 4096, 4096, 4096),
    ],
)
def test_the_context_of_each_rotary_scaling(
    tiny_config: dict[str, Any], kind: str, factor: float | None, original: int | None,
    stated: int, context: int, longest: int | None,
) -> None:  # fmt: skip
    config = parse_config(tiny_config | scaled(kind, factor, original, stated), {}, Path("c"))
    assert (config.context, config.longest) == (context, longest)


def test_a_stretched_context_is_served(checkpoint: Path) -> None:
    configure(checkpoint, **scaled("yarn", 4.0, 256, 256))
    assert load(checkpoint, kv_tokens=2048).context == 1024
    assert load(checkpoint, context=900, kv_tokens=2048).context == 900
    refused(checkpoint, "--context 1025", "rotary scaling, 1024", context=1025)
    configure(checkpoint, **scaled("linear", 2.0, None, 256))
    assert load(checkpoint, context=512, kv_tokens=2048).context == 512
    for factor in (0, -1.0, "x", True, 1e300):
        configure(checkpoint, **scaled("yarn", factor, 256, 256))  # type: ignore[arg-type]
        refused(checkpoint, "yarn", "factor")


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "longrope", "original_max_position_embeddings": 4096,
            "long_factor": [1.0 + i / 7 for i in range(64)], "short_factor": [1.0] * 64,
        },
    ],
    ids=lambda settings: str(settings["rope_type"]),
)  # fmt: skip
def test_frequencies_are_those_of_transformers(settings: dict[str, Any]) -> None:
    """In float32, at the stretched length."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from ramify.gpu.ops.rotary import inverse_frequencies

    rope = settings | {"rope_theta": 1e6}
    theirs = Qwen3Config(head_dim=128, max_position_embeddings=32768, rope_parameters=dict(rope))
    ours = parse_config(theirs.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}, {}, Path("c"))
    init = ROPE_INIT_FUNCTIONS[settings["rope_type"]]
    wanted = init(theirs, torch.device("cpu"), seq_len=131072)
    found = inverse_frequencies(ours.attention.rope or {}, 128, 131072)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-7, atol=0)
    assert found[1] == pytest.approx(wanted[1], rel=1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there(checkpoint: Path) -> None:
    refused(checkpoint, "--device cuda", device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_go_straight_to_the_gpu(tmp_path: Path, tiny_config: dict[str, Any]) -> None:
    """Neither the host's memory holds the model nor the GPU's more than one tensor beside it."""
    config = tiny_config | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, cuda = read_config(tmp_path), torch.device("cuda")
    weights = Decoder(shape, 64, torch.bfloat16, torch.device("cpu")).weights()
    fill_random(weights)
    names = sorted(weights)
    shards = {name: f"part-{place % 3}.safetensors" for place, name in enumerate(names)}
    for file in set(shards.values()):
        save_file({n: weights[n].clone() for n in names if shards[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    size = sum(view.nbytes for view in weights.values())
    most = max(view.nbytes for view in weights.values())
    torch.empty(1, device=cuda)
    torch.cuda.reset_peak_memory_stats()
    host, device = anonymous_bytes(), torch.cuda.memory_allocated()
    model = Decoder(shape, 64, torch.bfloat16, cuda)
    views = model.weights()
    packing = Packing(views, model.products(), float_weight)
    load_weights(tmp_path, views, lambda what, share: None, packing)
    del views
    assert torch.cuda.max_memory_allocated() - device < size + 2 * most
    assert anonymous_bytes() - host < size // 2
    for name, view in model.weights().items():
        assert torch.equal(view.cpu(), weights[name])


def anonymous_bytes() -> int:
    """This process' memory that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")
