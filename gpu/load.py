"""From a ModelConfig to a running executor: config.json, weights, KV pool, attention.

The one place that knows all parts. Progress is reported throughout, because a person waits.
"""

import importlib.util
import os
import time

import msgspec
import torch

from ramify.gpu.attention.torch_sdpa import TorchAttention
from ramify.gpu.executor import Executor, Progress
from ramify.gpu.kv_pool import KVPool, kv_bytes_per_token
from ramify.gpu.loader import fill_random, load_weights
from ramify.gpu.memory import free_bytes, plan_pages
from ramify.gpu.models.config import DecoderConfig, read_config
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.rows import RowTable
from ramify.gpu.torch_executor import TorchExecutor
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import ExecutorInfo

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_executor(config: ModelConfig, progress: Progress) -> Executor:
    """Load the checkpoint and make everything ready to run.

    `progress(what, fraction)` is called as the work goes on, fraction in 0..1. Raises ModelError
    if the folder cannot be served on this machine.
    """
    begin = time.perf_counter()
    progress("reading config.json", 0.0)
    shape = read_config(config.path)
    device = _device(config)
    dtype = _dtype(config, shape, device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    context = _context(config, shape)
    model = Decoder(shape, context, dtype, device)
    if config.load_format == "dummy":
        progress("making random weights", 0.0)
        fill_random(model.weights())
    else:
        load_weights(config.path, model.weights(), progress)
    attention = _attention(config, shape, device)
    info = _info(config, shape, model, context, dtype, device, attention)
    if not config.deterministic:  # its products read plain weights
        with torch.inference_mode():
            model.pack()
    progress(f"allocating KV cache for {info.pages * info.page_size} tokens", 1.0)
    pool = KVPool(
        shape.layers, info.pages, info.page_size, shape.kv_heads, shape.head_dim, dtype, device
    )
    table = RowTable(info)
    executor: Executor
    if attention == "triton":
        from ramify.gpu.fused_executor import FusedExecutor

        executor = FusedExecutor(model, pool, table, info, progress, config.deterministic)
    else:
        executor = TorchExecutor(
            model, TorchAttention(pool, table, shape.heads, shape.windows), table, info
        )
    progress("ready", 1.0)
    executor.info = _with_load_seconds(info, time.perf_counter() - begin)
    return executor


def _attention(config: ModelConfig, shape: DecoderConfig, device: torch.device) -> str:
    """Which back end: as asked. `auto` is the Triton kernels on CUDA where they know the model."""
    if config.deterministic:
        return _deterministic_attention(config, shape, device)
    if config.attention == "torch" or (config.attention == "auto" and device.type != "cuda"):
        return "torch"
    obstacle = _triton_obstacle(shape, device)
    if obstacle is None:
        return "triton"
    if config.attention == "auto":
        return "torch"
    raise ModelError(f"--attention triton: {obstacle}; give --attention torch")


def _deterministic_attention(config: ModelConfig, shape: DecoderConfig, device: torch.device) -> str:
    """Only the Triton kernels: what torch's products round to depends on how many rows they have."""
    if config.attention == "torch":
        raise ModelError("--deterministic runs on the Triton kernels: leave --attention torch out")
    obstacle = _triton_obstacle(shape, device)
    if obstacle is not None:
        raise ModelError(f"--deterministic runs on the Triton kernels: {obstacle}; serve on a CUDA "
                         "device, or leave --deterministic out")  # fmt: skip
    return "triton"


def _triton_obstacle(shape: DecoderConfig, device: torch.device) -> str | None:
    """Why the Triton kernels cannot serve this model here, None if they can."""
    if shape.head_dim not in (16, 32, 64, 128, 256):
        return f"the kernels know head sizes 16, 32, 64, 128 and 256, not {shape.head_dim}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU the kernels run only in Triton's interpreter (TRITON_INTERPRET=1), for tests"
    return None


def _context(config: ModelConfig, shape: DecoderConfig) -> int:
    """Longest sequence. Only `dynamic` rotary scaling stretches beyond what config.json states."""
    if config.context is None:
        return shape.max_position
    if config.context > shape.max_position and shape.rope["rope_type"] != "dynamic":
        raise ModelError(
            f"--context {config.context} is more than the model's max_position_embeddings, "
            f"{shape.max_position}: give at most that"
        )
    return config.context


def _device(config: ModelConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no CUDA device; install a CUDA build of torch, or "
                         "give --device cpu")  # fmt: skip
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(config: ModelConfig, shape: DecoderConfig, device: torch.device) -> torch.dtype:
    """auto: float32 on a CPU (exact; half precision is a choice there), else the checkpoint's own."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return _DTYPES.get(shape.dtype, torch.bfloat16)


def _info(
    config: ModelConfig,
    shape: DecoderConfig,
    model: Decoder,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
) -> ExecutorInfo:
    per_token = kv_bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, dtype)
    pages = plan_pages(
        config.kv_tokens, context, config.page_size, per_token, free_bytes(device), device,
        config.kv_fraction,
    )  # fmt: skip
    return ExecutorInfo(
        model=config.name if config.name is not None else config.path.resolve().name,
        architecture=shape.architecture,
        parameters=model.parameters(),
        vocab_size=shape.vocab_size,
        # a sequence that outgrows the pool could never be finished
        context=min(context, pages * config.page_size),
        page_size=config.page_size,
        pages=pages,
        max_rows=config.max_rows,
        step_tokens=config.step_tokens,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=attention,
        eos_token_ids=list(shape.eos_token_ids),
        kv_bytes_per_token=per_token,
        load_seconds=0.0,
    )


def _with_load_seconds(info: ExecutorInfo, seconds: float) -> ExecutorInfo:
    return msgspec.structs.replace(info, load_seconds=round(seconds, 3))
