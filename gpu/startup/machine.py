"""What settings leave to the model and the machine: the device, the numbers' type, the context."""

import torch

from ramify.gpu.models.definition import Definition
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def context_of(config: ModelConfig, shape: Definition) -> int:
    """Longest sequence: what config.json says, stretched as its rotary scaling says."""
    if config.context is None:
        return shape.context
    if shape.longest is not None and config.context > shape.longest:
        scaling = "" if shape.longest == shape.max_position else ", stretched by its rotary scaling"
        raise ModelError(
            f"--context {config.context} is more than the model's max_position_embeddings{scaling}, "
            f"{shape.longest}: give at most that"
        )
    return config.context


def device_of(config: ModelConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no CUDA device; install a CUDA build of torch, or "
                         "give --device cpu")  # fmt: skip
    return torch.device("cuda", torch.cuda.current_device())


def dtype_of(config: ModelConfig, shape: Definition, device: torch.device) -> torch.dtype:
    """auto: float32 on a CPU (exact; half precision is a choice there), else the checkpoint's own."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return _DTYPES.get(shape.dtype, torch.bfloat16)
