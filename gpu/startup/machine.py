"""Defaults that depend on model and machine: device, dtype, context; and an executor's facts."""

import torch

from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.models.definition import Definition
from ramify.gpu.ranks.checks import too_few_gpus
from ramify.gpu.startup.memory import kv_type, most_rows, most_step_tokens
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExecutorInfo

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def context_of(config: ModelConfig, shape: Definition) -> int:
    """Choose the longest sequence: the setting's, or config.json's. Raises ModelError: too long."""
    if config.context is None:
        return shape.context
    if shape.longest is not None and config.context > shape.longest:
        scaling = "" if shape.longest == shape.max_position else ", stretched by its rotary scaling"
        raise ModelError(
            f"--context {config.context} is more than the model's max_position_embeddings{scaling}, "
            f"{shape.longest}: give at most that"
        )
    return config.context


def device_of(config: ModelConfig, rank: int = 0) -> torch.device:
    """Choose the device of a rank: each of several has a GPU. Raises ModelError."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no CUDA device; install a CUDA build of torch, or "
                         "give --device cpu")  # fmt: skip
    if config.tensor_parallel > (count := torch.cuda.device_count()):
        raise too_few_gpus(config.tensor_parallel, count)
    if config.tensor_parallel > 1:
        torch.cuda.set_device(rank)
    return torch.device("cuda", torch.cuda.current_device())


def dtype_of(config: ModelConfig, shape: Definition, device: torch.device) -> torch.dtype:
    """Choose the dtype. auto: float32 on a CPU, else the checkpoint's own."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return _DTYPES.get(shape.dtype, torch.bfloat16)


def executor_info(
    config: ModelConfig,
    shape: Definition,
    parameters: int,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: KernelChoice,
    windows: bool,
) -> ExecutorInfo:
    """Collect the facts that are known before the KV pool is sized: `pages` is 0."""
    layout = shape.kv_layout(kv_type(config.kv_dtype, dtype), windows)
    return ExecutorInfo(
        model=config.name if config.name is not None else config.path.resolve().name,
        architecture=shape.architecture,
        parameters=parameters,
        vocab_size=shape.vocab_size,
        context=context,
        page_size=config.page_size,
        pages=0,
        max_rows=most_rows(config, device),
        step_tokens=most_step_tokens(config, device),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=attention.name,
        attention_reason=attention.reason,
        eos_token_ids=list(shape.eos_token_ids),
        kv_bytes_per_token=layout.bytes_per_token,
        load_seconds=0.0,
        state_bytes=shape.state_layout().bytes_per_slot,
        logits_cost=shape.logits_cost(parameters),
        window=(shape.window or 0) if windows else 0,
        window_bytes=layout.bytes_per_window_page,
        kv_dtype=config.kv_dtype,
    )
