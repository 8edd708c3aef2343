"""The checkpoint's own layer as a drafter, against its published description in plain torch.

DeepSeek-V3 (arXiv:2412.19437, section 2.2): h' = M [norm(Emb(t[i+1])); norm(h[i])], through one block,
a norm of its own, and the model's head; h behind the model's last norm. Qwen3-Next and Qwen3.5 call it
`mtp.*`, DeepSeek V3 and GLM 4.5 `model.layers.N.*` behind the last layer; `transformers` leaves these
tensors out.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack, unpack
from tests.gpu.conftest import Driver
from tests.gpu.drafting.conftest import write_folder
from tests.gpu.models.families import test_experts, test_hybrids, test_latents
from tests.gpu.models.families.test_families import prompts
from tests.gpu.models.families.test_hybrids import save
from tests.gpu.ranked import ranked

LENGTH = 5


PARTS = ("embedding", "hidden", "norm", "fc")
QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc", "mtp.layers.0")
DEEPSEEK = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
FAMILIES: dict[str, tuple[Callable[..., Any], str]] = {
    "qwen3_5": (lambda *about: test_hybrids.save(*about)[0], "Qwen3_5DecoderLayer"),
    "deepseek_v3": (test_latents.save, "DeepseekV3DecoderLayer"),
    "glm4_moe": (test_experts.save, "Glm4MoeDecoderLayer"),
    "small": (lambda *about: save_small(*about), "Qwen3_5DecoderLayer"),
}


def save_small(folder: Path, case: str) -> Any:
    """A layer of attention, for kernels that are interpreted by several ranks."""
    import transformers

    torch.manual_seed(7)
    config = transformers.Qwen3_5TextConfig(
        **test_hybrids.SMALL | {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"],
        }
    )  # fmt: skip
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def with_layer(folder: Path, family: str) -> tuple[Any, dict[str, Any]]:
    """A random model whose checkpoint has such a layer. Returns its block, and what is around it."""
    save_model, name = FAMILIES[family]
    model = save_model(folder, family)
    torch.manual_seed(11)
    config, module = model.config, importlib.import_module(type(model).__module__)
    kinds = getattr(config, "layer_types", None)
    last = config.num_hidden_layers - 1
    block = getattr(module, name)(
        config, last if kinds is None else kinds.index("full_attention")
    ).eval()
    qwen = name == "Qwen3_5DecoderLayer"
    width, before = config.hidden_size, f"model.layers.{last + 1}"
    names = QWEN if qwen else (*(f"{before}.{each}" for each in DEEPSEEK), before)
    around = {part: torch.randn(width) * 0.2 for part in PARTS[:3]}
    around["fc"] = torch.randn(width, 2 * width) * width**-0.5
    tensors = load_file(folder / "model.safetensors")
    for tensor, weight in block.state_dict().items():
        if tensor.endswith("norm.weight"):
            weight.normal_(0.0 if qwen else 1.0, 0.2)
        elif not tensor.endswith("correction_bias"):
            weight.normal_(0.0, 0.2)
        tensors[f"{names[4]}.{tensor}"] = weight.clone()
    tensors |= {f"{one}.weight": around[part] for one, part in zip(names, PARTS, strict=False)}
    if not qwen:  # the model's once more
        tensors[f"{before}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors[f"{before}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model, {"block": block, "offset": float(qwen), **around}


@torch.inference_mode()
def expected(model: Any, layer: dict[str, Any], tokens: list[int], count: int) -> list[int]:
    """What the layer says behind `tokens`: the next one but `count`, greedily."""
    config, embed = model.config, model.get_input_embeddings()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
            * (layer["offset"] + layer[name])
        )

    hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
    following, guesses = tokens[1:], list[int]()
    while len(guesses) < count:
        both = (norm(embed(torch.tensor(following)), "embedding"),
                norm(hidden, "hidden"))  # fmt: skip
        x = (torch.cat(both, -1) @ layer["fc"].t())[None]
        positions = torch.arange(len(following))[None]
        turns = model.model.rotary_emb(x, positions)
        mask = torch.full((len(following),) * 2, -torch.inf).triu(1)[None, None]
        x = layer["block"](x, position_embeddings=turns, attention_mask=mask)
        streams = norm(x[0] if x.dim() == 3 else x, "norm")
        guesses.append(int(model.lm_head(streams[-1]).argmax()))
        hidden, following = torch.cat((hidden, streams[-1:])), [*following, guesses[-1]]
    return guesses


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("qwen3_5", 1), ("deepseek_v3", 1), ("glm4_moe", 1), ("qwen3_5", 2), ("deepseek_v3", 4)],
)
def test_guesses_as_published_and_outputs_as_without(
    family: str, ranks: int, tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in chunks, rows beside each other, guesses that are refused."""
    model, layer = with_layer(tmp_path, family)
    texts = [prompts()[0][:19], prompts()[1][:7]]
    plain = drive(tmp_path)
    wanted = [plain.generate(0, text, LENGTH, plain.pages(0, 64)) for text in texts]
    config = ModelConfig(
        path=tmp_path, device="cpu", quantization="none", draft="mtp", max_rows=16, kv_tokens=1024,
        tensor_parallel=ranks,
    )  # fmt: skip
    with ranked(config) as executor:
        guess(Driver(executor), model, layer, texts, wanted, monkeypatch)


def guess(
    d: Driver, model: Any, layer: dict[str, Any], texts: list[list[int]], wanted: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    drafter = d.executor.drafts.drafter
    said: list[Any] = []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *about: said.append(propose(*about)) or said[-1])
    d.step(opens=[d.open(0, d.pages(0, 64))])
    d.prefill(0, 0, texts[0][:8], sample=False)
    opens = [d.open(1, d.pages(64, 64))]
    extends = [ExtendRow(0, 8, pack(texts[0][8:]), True), ExtendRow(1, 0, pack(texts[1]), True)]
    outputs = {row: [token] for row, token in d.step(opens=opens, extends=extends).items()}
    for at in range(LENGTH):
        before = {row: texts[row] + outputs[row] for row in (0, 1)}
        result = d.executor.launch(d.plan(decodes=[0, 1], drafts=pack([3, 1]))).result()
        tokens, counts = list(unpack(result.tokens)), list(unpack(result.counts))
        for row, count in zip(unpack(result.rows), counts, strict=True):
            outputs[row] += tokens[:count]
            del tokens[:count]
        if at < 2:
            guessed = said[-1].tokens.tolist()
            assert guessed[:3] == expected(model, layer, before[0], 3)
            assert guessed[3:] == expected(model, layer, before[1], 1)
    for row in (0, 1):
        assert outputs[row][:LENGTH] == wanted[row]
    assert d.executor.drafts.drafted == LENGTH * 4


def test_a_checkpoint_without_one_is_named(tmp_path: Path, drive: Any) -> None:
    save(tmp_path, "qwen3_5")
    with pytest.raises(ModelError, match=r"--draft mtp: .* has no tensors called mtp\."):
        drive(tmp_path, draft="mtp")
    save(tmp_path, "lfm2")
    with pytest.raises(ModelError, match="no layer for further tokens is known of Lfm2ForCausalLM"):
        drive(tmp_path, draft="mtp")
    write_folder(tmp_path / "small")
    with pytest.raises(ModelError, match="guesses beside weights as floats"):
        drive(tmp_path / "small", draft="mtp", quantization="int8")
