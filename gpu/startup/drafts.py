"""The choice of a drafter, by the settings and by what fits the model.

A draft model must have the same tokens, number by number: its guesses are compared with what the model
samples. Its sizes may be any. Decides from settings and files; `load` makes the drafter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ramify.gpu.attention.registry import KernelChoice, triton_obstacle
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.definition import Definition, LatentSettings
from ramify.gpu.models.mtp import MtpLayer
from ramify.protocol.checkpoint.files import json_files
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExecutorInfo

if TYPE_CHECKING:
    from ramify.gpu.drafting.device import DeviceDrafter
    from ramify.gpu.ranks.group import RankSums

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The chosen drafter. `folder`: the draft model's, if `kind` is "model". `reason`: for the log."""

    kind: Literal["none", "ngram", "model", "mtp"]
    reason: str
    folder: Path | None = None


def bundled(name: str) -> Path:
    """Find a folder that comes with the package."""
    return Path(str(files("ramify.gpu") / name))


def kernel_obstacle(model: Definition, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why a GPU's kernels cannot run this draft model; None: they can."""
    obstacle = triton_obstacle(model.attention_shapes(dtype), device)
    if obstacle is None and not model.equal:
        return "its layers are of unequal sizes"
    if obstacle is None and isinstance(model.attention, LatentSettings):
        return "its attention keeps latents"
    return obstacle


def choose_draft(config: ModelConfig, attention: KernelChoice | None = None) -> DraftChoice:
    """Choose the drafter that the settings ask for.

    `attention`: the model's, None: kernels that run all drafts. Raises ModelError if there is no such
    drafter for the model, or if the draft model has other tokens.
    """
    asked = config.draft
    if asked == "none":
        return DraftChoice("none", "as asked")
    if asked == "auto":
        return DraftChoice("none", "nothing is guessed unless it is asked for")
    obstacle = None if attention is None else _obstacle(attention)
    if obstacle is not None:
        raise ModelError(f"--draft {asked}: {obstacle}, or --draft none")
    if asked == "ngram":
        return DraftChoice("ngram", "as asked")
    if asked == "mtp":
        if attention is None:
            raise ModelError(
                "--draft mtp: the checkpoint's own layer guesses beside weights as floats; give "
                "--quantization none, --draft ngram or --draft none"
            )
        return DraftChoice("mtp", "as asked")
    folder = bundled("default_draft") if asked == "model" else Path(asked)
    if not folder.exists():
        raise ModelError(
            f"--draft {asked} is not a folder: give one, or auto, none, ngram or model, or mtp"
        )
    unlike = unlike_tokens(config.path, folder)
    if unlike is not None:
        raise ModelError(
            f"--draft {asked}: {unlike}; a draft model needs the tokenizer of the model that it guesses "
            "for: give another folder, --draft ngram or --draft none"
        )
    return DraftChoice("model", "as asked", folder)


def _obstacle(attention: KernelChoice) -> str | None:
    """Say why these kernels cannot serve drafts, and what to do; None: they can."""
    if attention.extend == "torch":
        return None
    if attention.decode == "flashinfer":
        return (
            "FlashInfer plans decodes on the host, which does not know how many drafts were accepted; "
            "give --attention auto or triton"
        )
    return None


def unlike_tokens(model: Path, draft: Path) -> str | None:
    """Say how the tokens of two checkpoints differ; None: they do not."""
    tokens: list[dict[int, str]] = []
    for path in (model, draft):
        whole = json_files(path)(_TOKENIZER)
        if whole is None:
            return f"{path / _TOKENIZER} is missing, so the tokens cannot be compared"
        tokens.append(dict(_tokens(whole, path)))
    unlike = list(islice(_differences(*tokens), 3))
    return "other tokens: " + ", ".join(unlike) if unlike else None


def _differences(ours: dict[int, str], theirs: dict[int, str]) -> Iterator[str]:
    for number in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(number), theirs.get(number)
        if a != b:
            yield f"{number} is {_shown(a)} in the model and {_shown(b)} in the draft model"


def _shown(token: str | None) -> str:
    return "nothing" if token is None else repr(token[:40])


def _tokens(raw: dict[str, Any], folder: Path) -> Iterator[tuple[int, str]]:
    """List the tokens with their numbers: the vocabulary, then added ones, special ones marked so."""
    try:
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, dict):
            yield from ((int(number), str(token)) for token, number in vocabulary.items())
        else:  # Unigram: pairs of a token and its score
            yield from ((number, str(entry[0])) for number, entry in enumerate(vocabulary))
        for added in raw.get("added_tokens") or []:
            special = " (special)" if added.get("special") else ""
            yield int(added["id"]), f"{added['content']}{special}"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{folder / _TOKENIZER} cannot be read: {error!r}") from None


def device_drafter(
    draft: DraftChoice,
    model: Decoder | MtpLayer | None,
    info: ExecutorInfo,
    ranks: "RankSums | None" = None,
) -> "DeviceDrafter | None":
    """Make the drafter of a CUDA executor, with `model` if the choice needs one."""
    if draft.kind == "none":
        return None
    if model is None:
        from ramify.gpu.drafting import triton_ngram

        return triton_ngram.DeviceNgramDrafter()
    from ramify.gpu.drafting.device_model import DeviceModelDrafter
    from ramify.gpu.drafting.device_mtp import DeviceMtpDrafter, FollowingMtp
    from ramify.gpu.executors.step_kernels import layer_sizes
    from ramify.gpu.ops.triton_linear import Products

    decoder = model.decoder if isinstance(model, MtpLayer) else model
    layout, device = decoder.config.kv_layout(decoder.dtype), decoder.device
    pool, sizes = (
        layout.allocate(info.pages, info.page_size, device),
        layer_sizes(decoder, Products(device)),
    )
    if isinstance(model, MtpLayer):
        made = FollowingMtp if ranks is not None and ranks.rank else DeviceMtpDrafter
        return made(model, pool, sizes, info.max_drafts, ranks)
    return DeviceModelDrafter(model, pool, sizes, info.max_drafts)
