"""Models with pictures against transformers, through the executor, with random weights in float32."""

import json
import re
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.gpu.models.config import read_config
from ramify.gpu.native.host import Isa
from ramify.gpu.startup.forecast import forecast
from ramify.gpu.startup.pictures import no_pictures
from ramify.gpu.startup.quantization import Quantization
from ramify.gpu.step.rows import PlanError
from ramify.gpu.vision.patches import Patches
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.pictures import (
    Picture,
    PictureLook,
    PictureSettings,
    PlacedPicture,
    box,
    fitted,
    placed,
    placeholders,
    words,
)
from ramify.protocol.plan import ExtendRow, pack, unpack

TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
IDS = {"image_token_id": 150, "vision_start_token_id": 151, "vision_end_token_id": 152}
IDS |= {"video_token_id": 153}
PROCESSOR = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "size": {"shortest_edge": 64 * 8, "longest_edge": 64 * 40},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VL", {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}},
        {"deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}, "moe_intermediate_size": 16,
            "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        },
        {"deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
        {},
    ),
}  # fmt: skip


_PLAIN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
_PLAIN |= {"patch_size": 4}
_COLOURS = {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.26, 0.27, 0.28]}
ROW_ENDS = [{"id": 154, "content": "[IMG_BREAK]"}, {"id": 155, "content": "[IMG_END]"}]
WINDOWED = ["sliding_attention"] * 3
GEMMA4 = {"model_type": "gemma4_text", "sliding_window": 11,
          "layer_types": [*WINDOWED, "full_attention"], "global_head_dim": 32,
          "eos_token_id": None, "pad_token_id": 149}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model", "image_size": 16}),
    "mistral3": (
        "Mistral3", {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-5},
        {"model_type": "pixtral", "hidden_act": "silu", "image_size": 64},
    ),
    "gemma3": (
        "Gemma3",
        {"model_type": "gemma3_text", "sliding_window": 11, "layer_types": [*WINDOWED, "full_attention"],
         "query_pre_attn_scalar": 16, "eos_token_id": None, "pad_token_id": 0},
        {"model_type": "siglip_vision_model", "image_size": 32},
    ),
    "gemma4": (
        "Gemma4",
        GEMMA4 | {"use_bidirectional_attention": "vision", "attention_k_eq_v": True,
                  "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        {"standardize": True},
    ),
    "gemma4_moe": (
        "Gemma4",
        GEMMA4 | {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0,
                  "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
                  "moe_intermediate_size": 16},
        {"standardize": True},
    ),
    "gemma4_small": (
        "Gemma4",
        GEMMA4 | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 12,
                  "vocab_size_per_layer_input": 160, "use_double_wide_mlp": True,
                  "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"use_clipped_linears": True},
    ),
}  # fmt: skip
OTHER_PARTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        _PLAIN, {"image_token_index": 150},
        _COLOURS | {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
    ),
    "mistral3": (
        _PLAIN, {"image_token_index": 150, "tie_word_embeddings": False},
        _COLOURS | {"size": {"longest_edge": 64}},
    ),
    "gemma3": (
        _PLAIN, {"image_token_index": 150, "boi_token_index": 151, "eoi_token_index": 152,
                 "mm_tokens_per_image": 16},
        _COLOURS | {"size": {"height": 32, "width": 32}, "resample": 2},
    ),
}  # fmt: skip
_GEMMA4_PARTS: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = (
    _PLAIN | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 210},
    {"boi_token_id": 151, "eoi_token_id": 152},  # others are in no output: transformers would pad them
    {"patch_size": 4, "max_soft_tokens": 24},
)  # fmt: skip
OTHER_PARTS |= {case: _GEMMA4_PARTS for case in OTHERS if case.startswith("gemma4")}


def save(folder: Path, case: str, **more: Any) -> Any:
    """A random model, saved and returned. `more`: of its text part."""
    import transformers

    torch.manual_seed(7)
    name, text, tower = (CASES | OTHERS)[case]
    own, ids, processor = (TOWER, IDS, PROCESSOR) if case in CASES else OTHER_PARTS[case]
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | text | more, vision_config=own | tower, **ids
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for name, weight in model.named_parameters():
        if re.search("visual|vision|projector|per_layer", name) or name.endswith(
            ("norm.weight", ".bias")
        ):
            about = 1.0 if "norm" in name and "weight" in name else 0.0
            torch.nn.init.normal_(weight, about, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith(("put_min", "put_max")):
            buffer.fill_(0.5 if name.endswith("max") else -0.4)
        elif name.endswith(("std_bias", "std_scale", "layer_scalar")):
            torch.nn.init.normal_(buffer, 0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if not (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": ROW_ENDS}))
    return model


def test_tensors_of_other_shapes_are_named(tmp_path: Path, drive: Any) -> None:
    """Names as published checkpoints have them."""
    save(tmp_path, "gemma4_small")
    file = tmp_path / "model.safetensors"
    tensors, layer = load_file(file), "model.vision_tower.encoder.layers.2"
    for name, other in (
        ("model.vision_tower.patch_embedder.position_embedding_table", torch.zeros(2, 209, 32)),
        (f"{layer}.self_attn.q_proj.input_max", torch.zeros(1)),
        (f"{layer}.mlp.down_proj.linear.weight", torch.zeros(32, 47)),
        ("model.embed_vision.embedding_projection.weight", torch.zeros(48, 31)),
    ):
        assert name in tensors
        save_file(tensors | {name: other}, file)
        with pytest.raises(ModelError, match=re.escape(f"{name} has shape {list(other.shape)}")):
            drive(tmp_path)
    save_file({name: each for name, each in tensors.items() if "output_min" not in name}, file)
    with pytest.raises(ModelError, match=r"encoder\.layers\.0\.mlp\.down_proj\.output_min"):
        drive(tmp_path)


def swap_experts(file: Path) -> None:
    """Inputs before outputs, as in published checkpoints."""
    tensors = load_file(file)
    swapped = {name for name in tensors if "mlp.experts." in name}
    assert swapped
    save_file({name: each.transpose(1, 2).contiguous() if name in swapped else each
               for name, each in tensors.items()}, file)  # fmt: skip


def pictures(settings: PictureSettings, *sizes: tuple[int, int]) -> list[Picture]:
    draw, found = np.random.default_rng(5), []
    for size in sizes:
        left, top, right, bottom = box(*fitted(*size, settings), settings)
        width, height = right - left, bottom - top
        found.append(Picture(width, height, draw.bytes(3 * width * height)))
    return found


def prompt(settings: PictureSettings, given: Sequence[Picture]) -> tuple[list[int], list[PlacedPicture]]:
    """Text, each picture, and text behind it, as a plan names them."""
    tokens, shown = [5, 6, 7], []
    for number, picture in enumerate(given):
        own = array("i", [*settings.before, *placeholders(picture, settings), *settings.after])
        shown.append(placed(len(tokens), own, picture, settings))
        tokens += [*unpack(words(own.tobytes(), settings)), 20 + number, 30, 41]
    return tokens, shown


def normalised(picture: Picture, settings: PictureSettings) -> torch.Tensor:
    """float32[3, height, width]."""
    shape = picture.height, picture.width, 3
    values = torch.tensor(np.frombuffer(picture.pixels, np.uint8)).view(shape) / 255
    return ((values - torch.tensor(settings.mean)) / torch.tensor(settings.std)).permute(2, 0, 1)


def padded_patches(settings: PictureSettings, given: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """Patches as Gemma 4's processor makes them, and their columns and rows."""
    most, side = settings.most // settings.patch**2, settings.patch
    patches, at = torch.zeros(len(given), most, 3 * side**2), torch.full((len(given), most, 2), -1)
    for number, each in enumerate(given):
        values = torch.tensor(np.frombuffer(each.pixels, np.uint8)) / 255
        rows, columns = each.height // side, each.width // side
        parts = values.view(rows, side, columns, side, 3).transpose(1, 2)
        patches[number, : rows * columns] = parts.reshape(rows * columns, -1)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        at[number, : rows * columns] = torch.stack((column, row), -1).view(-1, 2)
    return {"pixel_values": patches, "image_position_ids": at}


def see(d: Any, pictures: Sequence[PlacedPicture]) -> list[PlacedPicture]:
    """Let the tower run on them. Returns what a row is opened with."""
    shown = {each.key: each.picture for each in pictures if each.picture is not None}
    d.executor.launch(d.plan(looks=[PictureLook(*each) for each in shown.items()])).result()
    keys, end = set[bytes](), time.monotonic() + 60
    while d.executor.tower.busy:
        assert time.monotonic() < end
        if (seen := d.executor.tower.seen()) is not None:
            assert not seen.failed, seen.reason
            keys.update(seen.keys)
        time.sleep(0.001)
    assert keys == shown.keys()
    return [each.without_pixels() for each in pictures]


def reference(
    model: Any, settings: PictureSettings, tokens: list[int], given: Sequence[Picture], n: int
) -> list[int]:
    patches, ids = Patches(settings), torch.tensor([tokens])
    seen: dict[str, Any] = {}
    if settings.fit == "within":
        seen["mm_token_type_ids"] = (ids == settings.token).int()
        ids[ids == settings.token] = model.config.image_token_id
        seen |= padded_patches(settings, given)
    elif settings.fit == "area":
        seen["mm_token_type_ids"] = (ids == settings.token).int()
        seen["pixel_values"] = torch.cat([patches.cut(each) for each in given])
        seen["image_grid_thw"] = torch.tensor([[1, *patches.grid(each)] for each in given])
    else:
        high, wide = max(each.height for each in given), max(each.width for each in given)
        seen["pixel_values"] = torch.zeros(len(given), 3, high, wide)
        for values, each in zip(seen["pixel_values"], given, strict=True):
            values[:, : each.height, : each.width] = normalised(each, settings)
    if settings.fit == "stretch":
        seen["token_type_ids"] = (ids == settings.token).int()
    if settings.fit == "longest":
        seen["image_sizes"] = torch.tensor([[each.height, each.width] for each in given])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False,
            pad_token_id=0, eos_token_id=None, **seen,
        )  # fmt: skip
    return output[0, len(tokens) :].tolist()


@pytest.mark.parametrize("case", CASES | OTHERS)
def test_pictures_agree_with_transformers(case: str, tmp_path: Path, drive: Any, device: str) -> None:
    """Several pictures of odd sizes; a prompt in chunks that end inside of one; a prefix with pictures
    that is there already, whose pixels nobody brings again."""
    model = save(tmp_path, case)
    if case == "qwen3_vl_moe":
        swap_experts(tmp_path / "model.safetensors")
    d = drive(tmp_path, dtype="float32")
    settings = d.executor.info.pictures
    given = pictures(settings, (37, 61), (90, 17), (23, 23))
    tokens, shown = prompt(settings, given)
    expected = reference(model, settings, tokens, given, 12)

    def run(row: int, chunks: Sequence[int], cached: int, those: list[PlacedPicture]) -> list[int]:
        pages = [*d.pages(100, cached), *d.pages(100 + 200 * row + cached, len(tokens) + 12 - cached)]
        d.step(opens=[d.open(row, pages, cached=cached, pictures=those)])
        output: list[int] = []
        ends = [*chunks, len(tokens)]
        for start, end in zip([cached, *chunks], ends, strict=True):
            extend = ExtendRow(row, start, pack(tokens[start:end]), end == len(tokens))
            result = d.executor.launch(d.plan(extends=[extend])).result()
            output += unpack(result.tokens)
        return output + d.decode([row], 11)[row]

    shown = see(d, shown)
    assert run(0, [], 0, shown) == expected
    assert run(1, [], shown[1].start + 5, shown) == expected
    if not settings.whole:
        assert run(2, [shown[0].start + 3, shown[1].stop - 1], 0, shown) == expected
        return
    assert run(2, [shown[0].start, shown[1].stop], 0, shown) == expected
    d.step(opens=[d.open(3, d.pages(0, len(tokens)), cached=shown[0].start, pictures=shown)])
    start = shown[0].start
    with pytest.raises(PlanError, match="seen whole"):
        d.step(extends=[ExtendRow(3, start, pack(tokens[start : start + 4]), False)])


@pytest.mark.parametrize("case", ["qwen3_vl", "gemma4"])
def test_kernels_agree_with_transformers(
    case: str, tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA executor's, interpreted: a picture in pieces, the last of them a token, or whole where
    its tokens see each other; then a decode."""
    pytest.importorskip("triton", minversion="3.7")
    monkeypatch.setitem(TEXT, "num_hidden_layers", 2)
    both = {"layer_types": [WINDOWED[0], "full_attention"], "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 160}  # fmt: skip
    if case == "gemma4":
        monkeypatch.setitem(_GEMMA4_PARTS[2], "max_soft_tokens", 12)
    model = save(tmp_path, case, **(both if case == "gemma4" else {}))
    d = drive(tmp_path, attention="triton", dtype="float32")
    settings = d.executor.info.pictures
    given = pictures(settings, (32, 16))
    tokens, shown = prompt(settings, given)
    shown = see(d, shown)
    opens, ends = [d.open(0, d.pages(0, 64), pictures=shown)], [5, shown[0].stop - 1, shown[0].stop]
    ends = ends[2:] if settings.whole else ends
    for start, end in zip([0, *ends], ends, strict=False):
        extend = ExtendRow(0, start, pack(tokens[start:end]), False)
        d.step(opens=opens, extends=[extend])
        opens = []
    first = d.prefill(0, ends[-1], tokens[ends[-1] :])[0]
    assert [first, *d.decode([0], 1)[0]] == reference(model, settings, tokens, given, 2)


def test_why_a_model_that_sees_takes_no_pictures(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_vl")
    shape, cpu = read_config(tmp_path), torch.device("cpu")

    def told(isa: Isa | None = None, **settings: Any) -> str:
        return no_pictures(
            ModelConfig(path=tmp_path, **settings), shape, Quantization("q", "", isa), cpu
        )

    assert told() == ""
    assert "leave --tensor-parallel out" in told(tensor_parallel=2)
    assert "give --quantization none" in told(isa=cast(Isa, object()))
    assert forecast(tmp_path, ranks=2)["pictures"].startswith("ranks serve text alone")
    (tmp_path / "preprocessor_config.json").unlink()
    assert "preprocessor_config.json is missing" in told()


def test_what_is_forgotten_is_not_shown(tmp_path: Path, drive: Any) -> None:
    """Rows and chunks share what the tower made, and none of it is needed where KV is found."""
    save(tmp_path, "qwen3_vl")
    d = drive(tmp_path)
    settings = d.executor.info.pictures
    given = pictures(settings, (40, 40), (40, 40), (16, 80))
    tokens, shown = prompt(settings, given)
    plain = see(d, shown)
    opens = [d.open(row, d.pages(200 * row, len(tokens)), pictures=plain) for row in range(2)]
    extends = [ExtendRow(row, 0, pack(tokens), True) for row in range(2)]
    result = d.executor.launch(d.plan(opens=opens, extends=extends)).result()
    first, second = unpack(result.tokens)
    assert first == second
    half = plain[1].start + 2
    again = d.plan(
        opens=[d.open(2, [*d.pages(0, half), *d.pages(600, 200)], cached=half, pictures=plain)],
        extends=[ExtendRow(2, half, pack(tokens[half:]), True)],
        unseen=[shown[0].key],
    )
    assert unpack(d.executor.launch(again).result().tokens)[0] == first
    with pytest.raises(PlanError, match="not kept"):
        d.executor.launch(
            d.plan(
                opens=[d.open(3, d.pages(900, 200), pictures=plain)],
                extends=[ExtendRow(3, 0, pack(tokens), True)],
            )
        )
