"""The choice of the number format of weights, by the settings and by what this machine can do.

Decides from the settings, the model's sizes and the CPU's instructions: the same answer at every start
on the same machine. It loads and compiles nothing.
"""

import importlib.util
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ramify.gpu.models.definition import Definition
from ramify.gpu.ops.linear.base import Form, Weight
from ramify.gpu.ops.linear.four_bits import four_bit_form
from ramify.gpu.ops.linear.fp8 import Fp8Weight, fp8_form
from ramify.gpu.ops.linear.grouped import BITS, GroupedWeight
from ramify.gpu.ops.linear.humming import humming_form
from ramify.protocol.checkpoint.gguf import read_gguf
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError

if TYPE_CHECKING:
    from ramify.gpu.native.host import Isa

EXACT = "exact float32, equal to transformers"
_ADA = (8, 9)
_ARITHMETIC = (
    ("attention", "auto"), ("dtype", "auto"), ("kv_dtype", "auto"), ("deterministic", False)
)  # fmt: skip
_FOUR: dict[str, Literal["int4", "mxfp4"]] = {"int4": "int4", "mxfp4": "mxfp4"}
_TESTING = "; a CPU widens them in each product, which is slow: for testing"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The chosen number format.

    `isa`: the instructions that the CPU's kernels are compiled for; None: weights are not integers on a
    CPU. `kept`: a checkpoint's weights in this format stay as they are, others are floats; so do the
    blocks of a GGUF file, most of which are of format `name`.
    """

    name: Literal["none", "int8", "int4", "mxfp4", "fp8"]
    reason: str
    isa: "Isa | None" = None
    kept: bool = False

    @property
    def is_late(self) -> bool:
        """Whether weights get memory as floats only while they are loaded."""
        return self.isa is None and self.name != "none"

    def form(
        self, device: torch.device, floats: Form, dtype: torch.dtype | None = None
    ) -> tuple[Form, tuple[type[Weight], ...]]:
        """Return the form of weights without an `isa`, and the stored weights that it reads.

        `floats`: the form of floats. `dtype`: of rows that other packages' kernels may multiply; None:
        our kernels alone.
        """
        if self.name == "fp8":
            return fp8_form(device, not self.kept), (Fp8Weight,)
        if self.name == "int4" or self.name == "mxfp4":
            form = four_bit_form(self.name, not self.kept)
            return form if dtype is None else humming_form(form, dtype, device), (GroupedWeight,)
        return floats, ()


def choose_quantization(config: ModelConfig, shape: Definition, device: torch.device) -> Quantization:
    """Choose the format. Raises ModelError if one is asked for that cannot be had."""
    asked = config.quantization
    if asked == "none":
        return Quantization("none", "as asked")
    if (chosen := _fp8(config, shape, device) or _four_bits(config, shape, device)) is not None:
        return chosen
    assert asked in ("auto", "int8", "int4")
    isa: Isa | None = None
    obstacle = _setting(config, shape, device)
    if obstacle is None:
        isa, obstacle = _instructions()
    if obstacle is None:
        obstacle = _shape(shape, config.page_size)
    if obstacle is not None:
        if asked != "auto":
            raise ModelError(f"--quantization {asked}: {obstacle}; or give --quantization none")
        told = "; the file's blocks become floats" if config.path.is_file() else ""
        return Quantization("none", obstacle + told)
    assert isa is not None
    if isa.dot == "plain" and asked == "auto":
        return Quantization("none", f"{isa.name} has no dot products of 8-bit integers")
    if asked != "auto":
        return Quantization(asked, "as asked", isa)
    why = f"this CPU has {isa.name}; --quantization none: {EXACT}"
    bits = _stored_bits(config.path, shape)
    if bits is None:
        return Quantization("int8", why, isa)
    name: Literal["int4", "int8"] = "int4" if bits <= 4 else "int8"
    told = "the file's blocks" if config.path.is_file() else "the checkpoint's"
    return Quantization(name, f"{told}; {why}", isa, kept=True)


def _stored_bits(path: Path, shape: Definition) -> int | None:
    """Read how many bits the checkpoint's integers have that CPU kernels read; None: it has none."""
    if path.is_file():
        return block_bits(path)
    four = shape.stored is not None and shape.stored.name == "int4"
    return 4 if four else None


def _fp8(config: ModelConfig, shape: Definition, device: torch.device) -> Quantization | None:
    """Choose 8-bit floats; None: neither the settings nor the checkpoint ask for them."""
    asked, stored = config.quantization == "fp8", shape.stored is not None and shape.stored.name == "fp8"
    if not asked and (config.quantization != "auto" or not stored or device.type == "cpu"):
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _ADA:
        told = "the GPU does not know 8-bit floats: they came with compute capability 8.9"
        if asked:
            raise ModelError(f"--quantization fp8: {told}; give --quantization none")
        return Quantization("none", told)
    reason = "as asked" if asked else "the checkpoint's"
    return Quantization("fp8", reason + (_TESTING if device.type == "cpu" else ""), kept=stored)


def _four_bits(config: ModelConfig, shape: Definition, device: torch.device) -> Quantization | None:
    """Choose 4 bits on Triton's kernels; None: neither the settings nor the checkpoint ask for them."""
    asked, stored = config.quantization, shape.stored.name if shape.stored is not None else None
    wanted = stored if asked == "auto" else asked
    name = _FOUR.get(wanted or "")
    on_kernels = device.type == "cuda" or config.attention == "triton"
    if name is None or not (on_kernels or asked == "mxfp4"):
        return None
    reason = "as asked" if asked != "auto" else "the checkpoint's"
    told = reason + (_TESTING if device.type == "cpu" else "")
    return Quantization(name, told, kept=stored == name)


def block_bits(path: Path) -> int | None:
    """Count the bits of most numbers in a GGUF file's matrices; None: most are floats."""
    counts: dict[int | None, int] = {}
    for place in read_gguf(path, arrays=False).tensors.values():
        if len(place.shape) > 1:
            bits = BITS.get(place.type.name)
            counts[bits] = counts.get(bits, 0) + prod(place.shape)
    return max(counts, key=lambda bits: counts[bits], default=None)


def _setting(config: ModelConfig, shape: Definition, device: torch.device) -> str | None:
    """Say which other setting rules integers out; None: none does."""
    if device.type != "cpu":
        return "integers of 8 bits are served on CPUs only"
    if config.quantization == "auto" and shape.vision is not None:
        return "pictures are seen in floats; --quantization int8, if the model has it: text alone"
    for flag, unlike in _ARITHMETIC:
        value = getattr(config, flag)
        if value != unlike:
            shown = "" if value is True else f" {value}"
            return f"it has arithmetic of its own: leave --{flag.replace('_', '-')}{shown} out"
    return None


def _instructions() -> "tuple[Isa | None, str | None]":
    """Find this CPU's instructions, or why the kernels do not run on it."""
    if importlib.util.find_spec("llvmlite") is None:
        return None, "the package llvmlite is not installed"
    try:
        from ramify.gpu.native.host import host_isa

        isa = host_isa()
    except Exception as error:  # a damaged installation may raise any
        return None, f"llvmlite cannot be used ({type(error).__name__}: {error})"
    return isa, None if isa is not None else "the kernels need AVX2 or NEON, and a POSIX system"


def _shape(shape: Definition, page_size: int) -> str | None:
    from ramify.gpu.ops.cpu_ops import obstacle

    return obstacle(shape, page_size)
