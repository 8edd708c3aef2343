"""What becomes of pixels, against the processors of `transformers`, bit for bit in float32."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from ramify.actors.tokenizer.picture_program import decoded
from ramify.gpu.models.config import read_config
from ramify.gpu.vision.patches import Patches
from ramify.gpu.vision.processor import read_processor
from ramify.gpu.vision.tower import places
from ramify.protocol.errors import ModelError
from ramify.protocol.pictures import PictureDone, PictureRefused, PictureSettings, placed, words
from ramify.protocol.plan import unpack
from tests.gpu.vision.test_models import OTHER_PARTS, OTHERS, ROW_ENDS, TEXT

SIZES = [(64, 64), (33, 97), (200, 31), (500, 300), (65, 257), (63, 129)]


def saved(
    folder: Path, case: str, whole: dict[str, Any] | None = None, **changed: Any
) -> PictureSettings:
    """Those of a checkpoint. `whole`: of its config.json; `changed`: of its processor."""
    name, text, tower = OTHERS[case]
    own, ids, processor = OTHER_PARTS[case]
    config = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": name.lower(), **ids}
    config |= {"text_config": TEXT | text, "vision_config": own | tower} | (whole or {})
    for file, values in (
        ("config", config), ("preprocessor_config", processor | changed),
        ("tokenizer", {"added_tokens": ROW_ENDS}),
    ):  # fmt: skip
        (folder / f"{file}.json").write_text(json.dumps(values))
    return read_processor(folder, read_config(folder))


def seen(source: Image.Image, settings: PictureSettings) -> PictureDone:
    done = decoded(file(source, "PNG"), settings)
    assert isinstance(done, PictureDone), done
    return done


@pytest.mark.parametrize("case", [case for case in OTHERS if not case.startswith("gemma4")])
def test_pixels_are_those_of_transformers_bit_for_bit(case: str, tmp_path: Path) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    settings = saved(tmp_path, case)
    makers: dict[str, Any] = {"llava": LlavaImageProcessorPil, "mistral3": PixtralImageProcessorPil}
    more = {"patch_size": {"height": settings.unit, "width": settings.unit}}
    made = makers.get(case, Gemma3ImageProcessorPil)
    processor = made(**OTHER_PARTS[case][2], **(more if case == "mistral3" else {}))
    patches, merge, patch = Patches(settings, 1), settings.unit // settings.patch, settings.patch
    for number, (width, height) in enumerate(SIZES):
        draw = np.random.default_rng(number)
        source = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
        expected = processor(source, return_tensors="np")["pixel_values"][0]
        picture = seen(source, settings).picture
        rows, columns = patches.grid(picture)
        assert expected.shape == (3, rows * patch, columns * patch)
        parts = expected.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        cut = parts.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)
        assert np.array_equal(patches.cut(picture).numpy(), cut)


def file(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_pixels_of_gemma4_are_those_of_transformers_bit_for_bit(tmp_path: Path) -> None:
    """What its tower begins with is in the pixels. Strips, too, and one that is as it shall be; files of
    all kinds: transparent ones on white, turned ones upright, of several the first frame."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    settings = saved(tmp_path, "gemma4", max_soft_tokens=70)
    processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=70)
    patches, draw = Patches(settings, 1), np.random.default_rng(1)

    def drawn(width: int, height: int, colours: int = 3) -> Image.Image:
        return Image.fromarray(draw.integers(0, 256, (height, width, colours), dtype=np.uint8))

    sizes = [*SIZES, (1, 1), (3, 300), (400, 2), (120, 84)]
    files = [file(drawn(*size), "PNG") for size in sizes]
    clear, few, several = drawn(90, 50, 4), drawn(90, 50).quantize(32), [drawn(90, 50, 4)] * 2
    turned = Image.Exif()
    turned[0x0112] = 6
    files += [file(clear, "PNG", exif=turned), file(drawn(1500, 800, 4), "PNG")]  # in several strips
    files += [file(clear, "WEBP", lossless=True, save_all=True, append_images=several)]
    files += [file(drawn(90, 50, 2), "PNG"), file(few, "PNG", transparency=bytes(range(32)))]
    files += [file(few, "GIF", transparency=5, save_all=True, append_images=[few.rotate(180)])]
    files += [file(few.convert("L"), "PNG", transparency=9), file(few.convert("1"), "PNG")]
    files += [file(clear.convert("CMYK"), "JPEG", exif=turned)]
    for data in files:
        source = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        found, done = processor(source, return_tensors="np"), decoded(data, settings)
        assert isinstance(done, PictureDone)
        rows, columns = patches.grid(done.picture)
        at, count = found["image_position_ids"][0], rows * columns
        assert at[count - 1].tolist() == [columns - 1, rows - 1]
        assert at[count:].max(initial=-1) == -1
        values = 2 * (found["pixel_values"][0][:count] - np.float32(0.5))
        order = [each.numpy() for each in places(rows, columns, 3)]
        values = values[order[0] * columns + order[1]].reshape(count, 16, 3).transpose(0, 2, 1)
        assert np.array_equal(patches.cut(done.picture).numpy(), values.reshape(count, -1))


def test_sixteen_bits_of_grey_become_eight(tmp_path: Path) -> None:
    """Pillow would make white of all over 255."""
    settings = saved(tmp_path, "gemma4", max_soft_tokens=70)
    done = seen(Image.fromarray(np.full((40, 40), 30_000, np.uint16)), settings)
    assert set(done.picture.pixels) == {30_000 >> 8}


def test_rows_end_as_transformers_ends_them(tmp_path: Path) -> None:
    settings = saved(tmp_path, "mistral3")
    done = seen(Image.new("RGB", (90, 17)), settings)
    rows, columns = done.picture.height // 8, done.picture.width // 8
    tokens = [*unpack(words(done.ids, settings)), *settings.after]
    assert tokens == [*([*([150] * columns), 154] * rows)[:-1], 155]
    found = placed(7, unpack(done.ids), done.picture, settings)
    assert (found.stop, found.rows, found.columns) == (7 + len(tokens) - 1, rows, columns)
    assert [found.shown(found.start + at) for at in range(len(tokens))] == [
        sum(each == 150 for each in tokens[:at]) for at in range(len(tokens))
    ]
    refused = decoded(done.picture.pixels[:9], settings)
    assert isinstance(refused, PictureRefused)


@pytest.mark.parametrize(
    ("case", "changed", "why"),
    [
        ("llava", {"crop_size": {"height": 16, "width": 24}}, "the tower has 16"),
        ("llava", {"size": {"shortest_edge": 1 << 20}}, "shortest_edge is 1048576"),
        ("llava", {"do_pad": True}, "do_pad"),
        ("llava", {"do_center_crop": False}, "do_center_crop is False"),
        ("mistral3", {"size": {"height": 64, "width": 64}}, "longest_edge is None"),
        ("mistral3", {"do_center_crop": True}, "do_center_crop"),
        ("mistral3", {"resample": 2}, "resample is 2"),
        ("gemma3", {"resample": 3}, "only 2 .bilinear"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan is true"),
        ("gemma3", {"size": {"height": 32, "width": 64}}, "the tower has 32"),
        ("gemma3", {"image_seq_length": 256}, "image_seq_length is 256: the tower makes 16"),
        ("gemma4", {"do_normalize": True}, "do_normalize is True: only false is served"),
        ("gemma4", {"pooling_kernel_size": 2}, "pooling_kernel_size is 2: the tower has 3"),
        ("gemma4", {"max_soft_tokens": 1121}, "max_soft_tokens is 1121: must be an integer from 1 to"),
        ("gemma4", {"max_soft_tokens": 140}, "max_soft_tokens is 140: the tower has 210 positions"),
    ],
)
def test_settings_that_are_not_served(case: str, changed: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=why):
        saved(tmp_path, case, **changed)


@pytest.mark.parametrize(
    ("case", "changed", "why"),
    [
        ("llava", {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ("llava", {"vision_feature_select_strategy": "full"}, "select_strategy"),
        ("llava", {"vision_config": {"model_type": "siglip_vision_model"}}, "siglip_vision_model"),
        ("gemma3", {"mm_tokens_per_image": 15}, "must be a square"),
        ("gemma3", {"vision_config": {"image_size": 40}}, "divide image_size 40"),
        ("gemma4", {"vision_config": {"num_key_value_heads": 4}}, "num_key_value_heads is not 12"),
        ("gemma4", {"vision_config": {"hidden_size": 1152}}, "head_dim 64 their size"),
        ("gemma4", {"vision_config": {"model_type": "siglip_vision_model"}}, "with gemma4_vision"),
        ("gemma4", {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ("mistral3", {"vision_config": {"patch_size": 0}}, "patch_size is 0"),
        ("mistral3", {"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu'"),
    ],
)
def test_towers_that_are_not_served(case: str, changed: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=why):
        saved(tmp_path, case, changed)


def test_row_ends_that_the_tokenizer_has_not(tmp_path: Path) -> None:
    saved(tmp_path, "mistral3")
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "[IMG_BREAK]"}]}')
    with pytest.raises(ModelError, match=r"\[IMG_END\]"):
        read_processor(tmp_path, read_config(tmp_path))
