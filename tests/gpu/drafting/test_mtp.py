"""The checkpoint's own layer as a drafter, against its published description in plain torch.

DeepSeek-V3 (arXiv:2412.19437, section 2.2): h' = M [norm(Emb(t[i+1])); norm(h[i])], through one block,
then the model's head. Qwen3-Next and Qwen3.5 have it as `mtp.*`, with a norm of its own before the head,
and h behind the model's last norm; `transformers` leaves these tensors out.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExtendRow, pack, unpack
from tests.gpu.models.families.test_families import prompts
from tests.gpu.models.families.test_hybrids import save

LENGTH = 5


def with_layer(folder: Path, model: Any) -> dict[str, Any]:
    """Add random tensors of such a layer to a Qwen3.5. Returns the block, and what is around it."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

    torch.manual_seed(11)
    config = model.config
    block = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention")).eval()
    width = config.hidden_size
    around = {"fc": torch.randn(width, 2 * width) * width**-0.5}
    around |= {name: torch.randn(width) * 0.2
               for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    for name, weight in block.state_dict().items():
        if name.endswith("norm.weight"):
            weight.normal_(0.0, 0.2)
        tensors[f"mtp.layers.0.{name}"] = weight.clone()
    tensors |= {f"mtp.{name}.weight": weight for name, weight in around.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return {"block": block, **around}


@torch.inference_mode()
def expected(model: Any, layer: dict[str, Any], tokens: list[int], count: int) -> list[int]:
    """What the layer says behind `tokens`: the next one but `count`, greedily."""
    config, embed = model.config, model.get_input_embeddings()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * (1 + layer[name])
        )

    hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
    following, guesses = tokens[1:], list[int]()
    while len(guesses) < count:
        both = (norm(embed(torch.tensor(following)), "pre_fc_norm_embedding"),
                norm(hidden, "pre_fc_norm_hidden"))  # fmt: skip
        x = (torch.cat(both, -1) @ layer["fc"].t())[None]
        positions = torch.arange(len(following))[None]
        turns = model.model.rotary_emb(x, positions)
        mask = torch.full((len(following),) * 2, -torch.inf).triu(1)[None, None]
        x = layer["block"](x, position_embeddings=turns, attention_mask=mask)
        streams = norm(x[0] if x.dim() == 3 else x, "norm")
        guesses.append(int(model.lm_head(streams[-1]).argmax()))
        hidden, following = torch.cat((hidden, streams[-1:])), [*following, guesses[-1]]
    return guesses


def test_guesses_as_published_and_outputs_as_without(
    tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in chunks, rows beside each other, guesses that are refused."""
    model, _ = save(tmp_path, "qwen3_5")
    layer = with_layer(tmp_path, model)
    texts = [prompts()[0][:19], prompts()[1][:7]]
    plain = drive(tmp_path)
    wanted = [plain.generate(0, text, LENGTH, plain.pages(0, 64)) for text in texts]
    d = drive(tmp_path, draft="mtp", max_rows=16)
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
    with pytest.raises(ModelError, match="guesses on torch alone"):
        drive(tmp_path, draft="mtp", attention="triton")
