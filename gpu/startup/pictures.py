"""The vision tower of an executor, empty, and its processor's settings."""

import torch

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.definition import Definition
from ramify.gpu.startup.memory import most_rows, most_step_tokens
from ramify.gpu.startup.quantization import Quantization
from ramify.gpu.vision.pictures import Pictures
from ramify.gpu.vision.processor import read_processor
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExecutorInfo


def no_pictures(
    config: ModelConfig, shape: Definition, quantization: Quantization, device: torch.device
) -> str:
    """Say why a model with a vision tower takes no pictures; "": it does, or it has no tower."""
    if shape.vision is None:
        return ""
    if config.tensor_parallel > 1:
        return "ranks serve text alone: leave --tensor-parallel out"
    if quantization.isa is not None:
        return "8 and 4 bits on a CPU serve text alone: give --quantization none"
    try:
        settings = read_processor(config.path, shape)
    except ModelError as error:
        return str(error)
    room = most_step_tokens(config, device) - most_rows(config, device)
    if settings.whole and room < settings.most_tokens:
        return (
            f"all tokens of a picture, {settings.most_tokens}, are computed in one step: raise "
            f"--step-tokens by {settings.most_tokens - room}, or lower --max-rows"
        )
    return ""


def empty_pictures(config: ModelConfig, model: Decoder, info: ExecutorInfo) -> Pictures | None:
    """Make `Pictures` with an empty tower; None: the model has none, or takes no pictures."""
    vision = model.config.vision
    if vision is None or info.pictures_reason:
        return None
    settings = read_processor(config.path, model.config)
    return Pictures(vision.tower.empty(model.dtype, model.device), settings)
