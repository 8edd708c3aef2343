"""The loader of the checkpoint's own multi-token prediction (MTP) layer, as drafter (`--draft mtp`)."""

from pathlib import Path

import torch
from safetensors import safe_open

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.mtp import MtpLayer, mtp_definition
from ramify.gpu.models.split import leave_biases_to_first
from ramify.gpu.ops.linear.base import plain_weight
from ramify.gpu.progress import Progress
from ramify.gpu.startup.packing import Packing
from ramify.gpu.startup.random_weights import fill_random
from ramify.gpu.startup.ranks import Split
from ramify.gpu.startup.weights import checkpoint_files, load_weights
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError


def empty_mtp(config: ModelConfig, model: Decoder) -> MtpLayer:
    """Make the MTP layer of `model`'s checkpoint, empty. Raises ModelError if there is none."""
    found = mtp_definition(model.config)
    if found is None:
        raise ModelError(
            f"--draft mtp: no layer for further tokens is known of {model.config.architecture}; give "
            "--draft ngram, or --draft none"
        )
    shape, called = found
    if config.load_format != "dummy":
        _check(config.path, called.prefix)
    return MtpLayer(model, shape, called)


def fill_mtp(
    config: ModelConfig, layer: MtpLayer, progress: Progress, split: Split | None = None
) -> None:
    """Load the layer's weights, or a rank's part. The model's weights have their form already."""
    views, called = layer.weights(), layer.decoder.config.names
    packing = Packing(views, layer.products(), plain_weight)
    if config.load_format == "dummy":
        fill_random(views, loaded=packing.loaded, begin=packing.begin)
    else:
        whole = None if split is None else mtp_definition(split.whole)
        cut = None if split is None or whole is None else split.cuts(layer.decoder, whole[0])
        load_weights(config.path, views, progress, packing, called, layer.stored, cut)
    if split is not None and split.ranks.rank:
        leave_biases_to_first(layer.decoder)
    with torch.inference_mode():
        layer.complete()


def load_mtp(config: ModelConfig, model: Decoder, progress: Progress, split: Split | None) -> MtpLayer:
    """Make the layer and load its weights. Raises ModelError."""
    layer = empty_mtp(config, model)
    fill_mtp(config, layer, progress, split)
    return layer


def _check(folder: Path, prefix: str) -> None:
    """Check that the checkpoint has tensors of such a layer. Raises ModelError."""
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as file:
            if any(name.startswith(prefix) for name in file.keys()):  # noqa: SIM118
                return
    raise ModelError(
        f"--draft mtp: {folder} has no tensors called {prefix}*, of a layer that guesses; give --draft "
        "ngram, or --draft none"
    )
