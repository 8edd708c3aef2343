"""The tower and the processor's arithmetic against transformers, with random weights in float32."""

import numpy as np
import pytest
import torch
from PIL import Image

from ramify.gpu.vision.patches import Patches
from ramify.gpu.vision.qwen import QwenTower, QwenTowerSettings
from ramify.protocol.pictures import Picture, PictureSettings, fitted, placeholders

SETTINGS = PictureSettings(
    patch=16, unit=32, least=32 * 256, most=1 << 16, mean=(0.5, 0.5, 0.5), std=(0.5, 0.4, 0.3),
    before=(1,), after=(2,), token=3, model="test",
)  # fmt: skip
SIZES = [(32, 32), (33, 97), (200, 31), (500, 300), (64, 257), (1, 90)]


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def processed(source: Image.Image) -> Picture:
    width, height = fitted(*source.size, SETTINGS)
    resized = source.resize((width, height), resample=Image.Resampling.BICUBIC)
    return Picture(width, height, resized.tobytes())


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patches_are_those_of_transformers_bit_for_bit(size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=16, image_mean=list(SETTINGS.mean), image_std=list(SETTINGS.std),
        size={"shortest_edge": SETTINGS.least, "longest_edge": SETTINGS.most},
    )  # fmt: skip
    source = image(*size)
    expected = processor(source, return_tensors="np")
    patches, picture = Patches(SETTINGS), processed(source)
    assert [1, *patches.grid(picture)] == expected["image_grid_thw"][0].tolist()
    assert np.array_equal(patches.cut(picture).numpy(), expected["pixel_values"])


@pytest.fixture(scope="module")
def towers() -> tuple[torch.nn.Module, QwenTower]:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(1)
    config = Qwen3VLVisionConfig(
        depth=4, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=24,
        num_position_embeddings=25, deepstack_visual_indexes=[0, 2],
    )  # fmt: skip
    theirs = Qwen3VLVisionModel(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = QwenTower(
        QwenTowerSettings(
            layers=4, hidden=32, heads=2, intermediate=48, patch=16, merge=2, frames=2, places=25,
            output=24, deep=(0, 2), activation="tanh", theta=10_000.0,
        ),
        torch.float32, torch.device("cpu"),
    )  # fmt: skip
    given = {f"model.visual.{name}": value for name, value in theirs.state_dict().items()}
    views = ours.weights()
    assert views.keys() == given.keys()
    for name, view in views.items():
        view.copy_(given[name])
    return theirs, ours


def test_a_tower_computes_what_transformers_does(towers: tuple[torch.nn.Module, QwenTower]) -> None:
    theirs, ours = towers
    patches = Patches(SETTINGS)
    pictures = [processed(image(*size)) for size in SIZES]
    grids = [patches.grid(each) for each in pictures]
    with torch.inference_mode():
        expected = theirs(
            torch.cat([patches.cut(each) for each in pictures]),
            torch.tensor([[1, *grid] for grid in grids]),
        )
    parts = [expected.pooler_output, *expected.deepstack_features]
    counts = [rows * columns // 4 for rows, columns in grids]
    for place, (picture, grid) in enumerate(zip(pictures, grids, strict=True)):
        found = ours.forward(patches.cut(picture)[None], *grid)[0]
        for number, part in enumerate(parts):
            torch.testing.assert_close(found[:, number], part.split(counts)[place])


def test_pictures_of_one_size_run_together(towers: tuple[torch.nn.Module, QwenTower]) -> None:
    _, ours = towers
    patches = Patches(SETTINGS)
    cut = [patches.cut(processed(image(64, 128, seed)))[None] for seed in (1, 2)]
    both = ours.forward(torch.cat(cut), 8, 4)
    torch.testing.assert_close(both, torch.cat([ours.forward(each, 8, 4) for each in cut]))


def test_placeholders_tell_pictures_apart() -> None:
    first = processed(image(128, 128))
    pixels = bytearray(first.pixels)
    pixels[7] ^= 1
    turned = Picture(first.height, first.width * 2, first.pixels * 2)
    others = [Picture(first.width, first.height, bytes(pixels)), turned]
    ids = [placeholders(each, SETTINGS) for each in (first, first, *others)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == first.width * first.height // 32**2
    assert min(ids[0]) >= 1 << 30
    assert not set(ids[0]) & set(ids[2])
    assert not set(ids[0]) & set(ids[3])
    with pytest.raises(ValueError, match="is 1 tokens: at least 8 are due"):
        placeholders(Picture(32, 32, bytes(3 * 32 * 32)), SETTINGS)


@pytest.mark.parametrize("size", [(0, 9), (20_000, 9), (16_000, 16_000), (1, 201)], ids=str)
def test_sizes_are_bounded(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="pixels: "):
        fitted(*size, SETTINGS)
