"""Whether a model's weights are served as 8-bit integers: what was asked for, and what can be had here.

Decides from the settings, the model's sizes and the CPU's instructions: the same answer at every start
on the same machine. It loads and compiles nothing.
"""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ramify.gpu.models.definition import Definition
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError

if TYPE_CHECKING:
    from ramify.gpu.native.host import Isa

EXACT = "exact float32, equal to transformers"


@dataclass(frozen=True, slots=True)
class Quantization:
    """`isa`: the instructions that the kernels are compiled for; None without quantization."""

    name: Literal["none", "int8"]
    reason: str
    isa: "Isa | None" = None


def choose_quantization(config: ModelConfig, shape: Definition, device: torch.device) -> Quantization:
    """Raises ModelError if int8 is asked for and cannot be had."""
    asked = config.quantization
    if asked == "none":
        return Quantization("none", "as asked")
    isa: Isa | None = None
    obstacle = _setting(config, device)
    if obstacle is None:
        isa, obstacle = _instructions()
    if obstacle is None:
        obstacle = _shape(shape, config.page_size)
    if obstacle is not None:
        if asked == "int8":
            raise ModelError(f"--quantization int8: {obstacle}; or give --quantization none")
        return Quantization("none", obstacle)
    assert isa is not None
    if isa.dot == "plain" and asked == "auto":
        return Quantization("none", f"{isa.name} has no dot products of 8-bit integers")
    why = "as asked" if asked == "int8" else f"this CPU has {isa.name}; --quantization none: {EXACT}"
    return Quantization("int8", why, isa)


def _setting(config: ModelConfig, device: torch.device) -> str | None:
    """Which other setting rules int8 out, None if none does."""
    if device.type != "cpu":
        return "8-bit integers are served on CPUs only"
    for flag, unlike in (("attention", "auto"), ("dtype", "auto"), ("deterministic", False)):
        value = getattr(config, flag)
        if value != unlike:
            shown = "" if value is True else f" {value}"
            return f"it has arithmetic of its own: leave --{flag}{shown} out"
    return None


def _instructions() -> "tuple[Isa | None, str | None]":
    """This CPU's instructions, or why the kernels do not run on it."""
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
