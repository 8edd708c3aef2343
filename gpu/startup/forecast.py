"""A forecast of serving a model here, from its config, its file's header and this machine.

Loads no weights and compiles nothing. The forecast of tokens a second assumes that reading memory takes
all the time. `ramify info` shows it.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ramify.gpu.attention.registry import choose
from ramify.gpu.models.config import read_config
from ramify.gpu.models.decoder import EMBEDDING, Decoder
from ramify.gpu.models.definition import Definition
from ramify.gpu.models.split import part_of
from ramify.gpu.ops.linear.base import Use
from ramify.gpu.ops.linear.fp8 import GROUP, Fp8Format
from ramify.gpu.ops.linear.grouped import BITS, WITH_OFFSETS
from ramify.gpu.ranks.checks import refuse_file, refuse_no_experts
from ramify.gpu.startup.gguf_weights import tensor_names
from ramify.gpu.startup.machine import context_of, device_of, dtype_of
from ramify.gpu.startup.memory import free_bytes, has_windows, plan_pages
from ramify.gpu.startup.pictures import no_pictures
from ramify.gpu.startup.quantization import Quantization
from ramify.gpu.startup.ranks import quantization_of
from ramify.gpu.startup.weights import check_weights
from ramify.protocol.checkpoint.gguf import read_gguf
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError

_READ = 1 << 28  # bytes that are read to measure the memory
_SCALES = {"int4": 2 / 128, "mxfp4": 1 / 32}  # of a number, on a GPU
_LEAST_GROUP = 32  # inputs of 4 bits that ranks do not share
_GROUP = 2 / 32  # bytes of a scale, for each number of its group


def forecast(path: Path, ranks: int = 1, whole_experts: bool = False) -> dict[str, str]:
    """Collect the facts by name, in words. Raises ModelError if the defaults cannot serve the model.

    `ranks`: how many hold the model together, each some experts whole if `whole_experts`; facts are
    those of the first, which has most.
    """
    refuse_file(path, ranks)
    config = ModelConfig(path=path)
    whole = read_config(path)
    if whole_experts:
        refuse_no_experts(whole.has_experts, ranks)
    shape = part_of(whole, 0, ranks, whole_experts)
    device = device_of(config)
    dtype, context = dtype_of(config, shape, device), context_of(config, shape)
    divided = ModelConfig(path=path, tensor_parallel=ranks)
    quantization = quantization_of(divided, shape, device)
    check_groups(whole, shape, quantization)
    sizes = Sizes(path, shape, quantization, dtype, whole)
    kept = torch.float16 if quantization.isa is not None else dtype
    token = shape.kv_layout(kept).bytes_per_token
    free = free_bytes(device) // (ranks if device.type == "cpu" else 1)
    room = plan_pages(None, context, 1, token, free - sizes.weights, device, config.kv_fraction)
    ends = has_windows(config, shape, context)
    shapes = shape.attention_shapes(dtype, ends)
    attention = choose(config.attention, shapes, device, config.deterministic)
    rate = bandwidth(device)
    isa = quantization.isa
    windows = "; more, as layers with a window keep the last tokens alone" if ends else ""
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    blind = no_pictures(divided, whole, quantization, device)
    seen = {} if whole.vision is None else {"pictures": blind or "are taken"}
    return {
        "device": f"{device}, {free >> 20} MiB are free{each}",
        "weights": f"{quantization.name if quantization.name != 'none' else str(dtype)[6:]} "
        f"({quantization.reason}), {sizes.weights / 2**20:.0f} MiB in memory{each}",
        "kernels": f"our own for {isa.name}" if isa else f"torch, attention {attention.name}",
        "KV cache": f"{token} bytes a token{each}, room for {room} tokens{windows}",
        "longest sequence": f"{min(context, room)} tokens",
        "read for a token": f"{sizes.read / 2**20:.1f} MiB of weights{each}",
        "memory": f"{rate / 1e9:.1f} GB/s, measured just now",
        "tokens a second": f"about {rate / sizes.read:.0f} for one stream, if memory alone sets the pace"
        + (" and sums over the ranks take no time" if each else ""),
        **seen,
    }


def check_groups(whole: Definition, part: Definition, quantization: Quantization) -> None:
    """Check that ranks divide no group of inputs with one scale. Raises ModelError."""
    name = quantization.name
    if not quantization.kept or whole.stored is None or name not in ("fp8", "int4", "mxfp4"):
        return
    group = _LEAST_GROUP
    if name == "fp8":
        group = GROUP if isinstance(whole.stored, Fp8Format) and whole.stored.blocks else 1
    models = (Decoder(each, 1, torch.float32, torch.device("meta")) for each in (whole, part))
    for (linear, names), (own, _) in zip(*(model.products() for model in models), strict=True):
        inputs = own.tensor.shape[1]
        scaled = name != "mxfp4" or any(".experts." in each for each in names)
        if scaled and inputs < linear.tensor.shape[1] and inputs % group:
            raise ModelError(
                f"{names[0]}: {inputs} inputs for a rank divide groups of {group} that have one scale; "
                "give another --tensor-parallel, or, if it is an expert's, --expert-parallel"
            )


class Sizes:
    """The bytes of a model's `weights`, and of those that are `read` for a token."""

    def __init__(
        self, path: Path, shape: Definition, quantization: Quantization, dtype: torch.dtype,
        whole: Definition | None = None,
    ) -> None:  # fmt: skip
        """`whole`: the model, if `shape` is a rank's part of it."""
        self._quantization = quantization
        self._plain = dtype.itemsize
        self._types: dict[str, str] = {}
        if path.is_file():
            tensors = read_gguf(path, arrays=False).tensors
            names = ((ours, there) for ours, there in tensor_names(shape).items() if there in tensors)
            self._types = {ours: tensors[there].type.name for ours, there in names}
        model = Decoder(shape, 1, dtype, torch.device("meta"))
        if path.is_dir():
            checked = model if whole is None else Decoder(whole, 1, dtype, torch.device("meta"))
            check_weights(path, checked.weights(), shape.names, shape.stored)
        chosen = {one.experts: one.router.top for one in shape.experts}
        products = idle = 0.0
        for linear, tensors_ in model.products():
            size = linear.tensor.numel() * self._bytes(linear.use, tensors_)
            products += size
            if linear.stacked:  # a token goes through some of them
                idle += size * (1 - chosen[linear.stacked] / linear.stacked)
        vectors = sum(view.numel() for view in model.weights().values() if view.dim() == 1)
        tables = vectors * dtype.itemsize
        embedding = model.embedding.numel() * self._table_bytes(shape.tied)
        if shape.tied and shape.head_lines is not None:  # the head's lines are some of the embedding's
            embedding = (model.embedding.numel() - model.head.tensor.numel()) * self._plain
        self.weights = int(products + tables + embedding)
        self.read = int(products + tables - idle)

    def _bytes(self, use: Use, names: Sequence[str]) -> float:
        """Count the bytes a number of a product with tensors of these names."""
        if self._quantization.name == "fp8" and use not in ("logits", "scores"):
            return 1 + 4 / GROUP  # if a scale is of so many
        if self._quantization.isa is None and self._quantization.name in ("int4", "mxfp4"):
            wide = use in ("logits", "scores")
            if self._quantization.kept and self._quantization.name == "mxfp4":  # it has experts alone
                wide = wide or not any(".experts." in name for name in names)
            return self._plain if wide else 0.5 + _SCALES[self._quantization.name]
        if self._quantization.isa is None:
            return self._plain
        return self._integers(use, names)

    def _table_bytes(self, tied: bool) -> float:
        """Count the bytes a number of the embedding, beyond those of the head."""
        if self._quantization.isa is None:
            return 0 if tied else self._plain
        if self._types.get(EMBEDDING) not in BITS:
            return 0  # floats are mapped from the file
        if self._quantization.name == "int8" and not self._quantization.kept:
            return self._plain
        return 0 if tied else self._integers("logits", [EMBEDDING])

    def _integers(self, use: Use, names: Sequence[str]) -> float:
        if self._quantization.kept and not self._types:
            return 1 if use == "logits" else 0.5 + _GROUP
        kinds = [self._types.get(name, "") for name in names if name.endswith(".weight")]
        blocks = all(kind in BITS for kind in kinds)
        rounds = self._quantization.name == "int4" and not self._quantization.kept and use != "logits"
        bits = max(BITS[kind] for kind in kinds) if blocks else 8
        if rounds:
            bits = 4
        elif not blocks or not (self._quantization.kept or self._quantization.name == "int4"):
            return 1
        offsets = blocks and bits > 0 and any(kind in WITH_OFFSETS for kind in kinds)
        return (0.5 if bits == 4 else 1) + _GROUP * (1 + offsets)


def bandwidth(device: torch.device) -> float:
    """Measure how many bytes a second memory delivers: the best of five."""
    numbers = torch.ones(_READ // 8, dtype=torch.int64, device=device)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        int(numbers.sum())
        best = min(best, time.perf_counter() - begin)
    return _READ / best
