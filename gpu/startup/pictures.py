"""Makes what an executor sees pictures with: an empty tower, and its processor's settings."""

import logging

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.startup.memory import most_rows, most_step_tokens
from ramify.gpu.vision.pictures import Pictures
from ramify.gpu.vision.processor import read_processor
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError

_LOG = logging.getLogger("ramify.gpu.startup")


def empty_pictures(config: ModelConfig, model: Decoder) -> Pictures | None:
    """With an empty tower; None: the model has none, or its processor's settings are missing."""
    vision = model.config.vision
    if vision is None:
        return None
    try:
        settings = read_processor(config.path, model.config)
        room = most_step_tokens(config, model.device) - most_rows(config, model.device)
        if settings.whole and room < settings.most_tokens:
            raise ModelError(
                f"all tokens of a picture, {settings.most_tokens}, are computed in one step: raise "
                f"--step-tokens by {settings.most_tokens - room}, or lower --max-rows"
            )
    except ModelError as error:
        _LOG.warning("pictures are not served: %s", error)
        return None
    return Pictures(vision.tower.empty(model.dtype, model.device), settings)
