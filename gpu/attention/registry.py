"""The attention back ends, and the choice of one for a model on this machine.

A `KernelChoice` says why it was made. If the back end that is asked for cannot serve, an error says what
to do. This file does not know how the kernels work.
"""

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.attention.by_shape import AttentionByShape
from ramify.gpu.attention.spec import AttentionShape
from ramify.gpu.step.rows import RowTable
from ramify.protocol.errors import ModelError

_LOG = logging.getLogger("ramify.gpu.attention")
_MOST_HEADS = 64  # query heads that share a KV head: a tile of the kernels holds all of a token's
_ADA = (8, 9)
_HOPPER = (9, 0)  # FA3 is written for its matrix instructions and runs nowhere else


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The chosen kernels. `extend`: "torch", "triton", "fa2" or "fa3"; the last two are FlashInfer's.

    `decode`: "torch", "triton" or "flashinfer".
    """

    extend: str
    decode: str
    reason: str
    deterministic: bool = False  # kernels whose results never depend on the batch
    compiles: bool = False  # at the first step: FlashInfer lacks some of its kernels

    @property
    def name(self) -> str:
        """The name that logs and `ExecutorInfo` show."""
        if self.deterministic:
            return f"{self.extend}, deterministic"
        if self.extend == self.decode:
            return self.extend
        return f"flashinfer prefill {self.extend} + {self.decode} decode"

    def back_end(
        self,
        table: RowTable,
        shapes: Sequence[AttentionShape],
        device: torch.device,
        pages: Tensor | None = None,
        windows: Tensor | None = None,
    ) -> AttentionBackend:
        """Make the back end, which reads page tables in `table` on the host or `pages` on the device.

        `shapes`: see `choose`. pages int32[rows, columns]: torch does without. `windows`: the same of
        window pages.
        """
        # decodes share keys in layers without a window, and in the first part alone
        ordered = sorted(shapes, key=lambda shape: None not in shape.windows)
        make = BACK_ENDS[self.kind]
        parts = [
            (shape, make(self, table, shape, device, windows if shape.windowed else pages))
            for shape in ordered
        ]
        return parts[0][1] if len(parts) == 1 else AttentionByShape(parts)

    @property
    def kind(self) -> str:
        """The key in `BACK_ENDS`."""
        if self.deterministic:
            return "deterministic"
        return "flashinfer" if self.extend in ("fa2", "fa3") else self.extend


Maker = Callable[[KernelChoice, RowTable, AttentionShape, torch.device, Tensor | None], AttentionBackend]


def _torch(
    choice: KernelChoice,
    table: RowTable,
    shape: AttentionShape,
    device: torch.device,
    pages: Tensor | None,
) -> AttentionBackend:
    from ramify.gpu.attention.torch_attention import TorchAttention
    from ramify.gpu.attention.torch_latent import TorchLatent

    return (TorchAttention if shape.value_dim is None else TorchLatent)(table, shape, device)


def _triton(
    choice: KernelChoice,
    table: RowTable,
    shape: AttentionShape,
    device: torch.device,
    pages: Tensor | None,
) -> AttentionBackend:
    from ramify.gpu.attention.triton_expanded import TritonLatent
    from ramify.gpu.attention.triton_paged import TritonPaged

    return (TritonPaged if shape.latent is None else TritonLatent)(_there(pages), table, shape)


def _invariant(
    choice: KernelChoice,
    table: RowTable,
    shape: AttentionShape,
    device: torch.device,
    pages: Tensor | None,
) -> AttentionBackend:
    from ramify.gpu.attention.triton_invariant import InvariantPaged

    return InvariantPaged(_there(pages), table, shape)


def _flashinfer(
    choice: KernelChoice,
    table: RowTable,
    shape: AttentionShape,
    device: torch.device,
    pages: Tensor | None,
) -> AttentionBackend:
    from ramify.gpu.attention.flashinfer_paged import FlashInferPaged

    return FlashInferPaged(_there(pages), table, shape, choice.extend, choice.decode)


def _there(pages: Tensor | None) -> Tensor:
    if pages is None:
        raise ValueError("this back end reads the page table on the device: give `pages`")
    return pages


# Imported where they are made, because Triton and FlashInfer may be missing. To add a back end, write
# its file, add a line here, and say in `choose` when it serves.
BACK_ENDS: dict[str, Maker] = {
    "torch": _torch,
    "triton": _triton,
    "deterministic": _invariant,
    "flashinfer": _flashinfer,
}


def choose(
    asked: str,
    shapes: Sequence[AttentionShape],
    device: torch.device,
    deterministic: bool = False,
) -> KernelChoice:
    """Choose by `asked`, of `--attention`, for layers of `shapes`. Raises ModelError: it cannot serve.

    "auto" on CUDA is Triton, and FA3 for extends where FlashInfer's kernels are at hand on a
    Hopper GPU: see docs/log/gpu.md for the measurements.
    """
    if deterministic:
        return _deterministic(asked, shapes, device)
    if asked == "torch":
        return KernelChoice("torch", "torch", "as asked")
    if asked == "auto" and device.type != "cuda":
        return KernelChoice("torch", "torch", "the device is a CPU")
    obstacle = triton_obstacle(shapes, device)
    if obstacle is not None:
        if asked == "auto":
            return KernelChoice("torch", "torch", obstacle)
        raise ModelError(f"--attention {asked}: {obstacle}; give --attention torch")
    if asked == "triton":
        return KernelChoice("triton", "triton", "as asked")
    shape = shapes[0]
    obstacle = _flashinfer_obstacle(shape, device, _reads_codes(shape, asked))
    if len(shapes) > 1:
        obstacle = "the model's layers have heads of several sizes, which it is not given"
    if any(each.windowed for each in shapes):
        obstacle = (
            "layers with a window keep the last tokens in pages of their own, which it is not given"
        )
    if asked == "auto":
        return _automatic(obstacle, shape, device)
    if obstacle is None:
        obstacle = _import_fault()
    if obstacle is None:
        extend = "fa3" if _is_hopper(device) else "fa2"
        kernels = _kernels(extend, "flashinfer", shape)
        built = all(map(_is_built, kernels))
        obstacle = _load_fault(kernels) if built else None
        if obstacle is None and (built or _can_build()):
            return KernelChoice(extend, "flashinfer", "as asked", compiles=not built)
        obstacle = obstacle or (
            f"its kernels for {_kind(shape)} are not compiled, and there is no nvcc with ninja: "
            "install flashinfer-jit-cache of the same version, or a CUDA toolkit and ninja"
        )
    raise ModelError(f"--attention flashinfer: {obstacle}; or give --attention triton")


def _deterministic(asked: str, shapes: Sequence[AttentionShape], device: torch.device) -> KernelChoice:
    """Choose Triton's kernels: results of torch's products and of FlashInfer depend on the batch."""
    if asked not in ("auto", "triton"):
        raise ModelError(f"--deterministic runs on Triton kernels: leave --attention {asked} out")
    obstacle = triton_obstacle(shapes, device)
    if obstacle is not None:
        raise ModelError(f"--deterministic runs on Triton kernels: {obstacle}; serve on a CUDA device, "
                         "or leave --deterministic out")  # fmt: skip
    return KernelChoice("triton", "triton", "--deterministic", deterministic=True)


def _automatic(obstacle: str | None, shape: AttentionShape, device: torch.device) -> KernelChoice:
    """Choose FlashInfer only if its kernels are built: a server does not compile for minutes unasked."""
    if obstacle is None and not _is_hopper(device):
        obstacle = "its FA2 is no faster, and the GPU is not a Hopper, which FA3 needs"
    fault = _import_fault() if obstacle is None else None
    if obstacle is None and fault is None:
        kernels = _kernels("fa3", "triton", shape)
        if all(map(_is_built, kernels)):
            fault = _load_fault(kernels)
        else:
            obstacle = (
                f"its FA3 kernels for {_kind(shape)} are not compiled (install "
                "flashinfer-jit-cache, or start once with --attention flashinfer)"
            )
    if fault is not None:
        _LOG.warning("FlashInfer is installed and cannot be used, Triton's kernels serve: %s", fault)
    if obstacle is not None or fault is not None:
        return KernelChoice("triton", "triton", f"FlashInfer is not used: {obstacle or fault}")
    return KernelChoice("fa3", "triton", "a Hopper GPU and FlashInfer's FA3 kernels are here")


def triton_obstacle(shapes: Sequence[AttentionShape], device: torch.device) -> str | None:
    """Say why the Triton kernels cannot serve a model with such layers here; None: they can."""
    for shape in shapes:
        if shape.value_dim is not None:
            turned = shape.head_dim - shape.value_dim
            if turned not in (16, 32, 64, 128):
                return f"the kernels know latents with 16, 32, 64 or 128 turned numbers, not {turned}"
            shape = shape.tiled
        if shape.head_dim not in (16, 32, 64, 128, 256, 512):
            return f"the kernels know head sizes 16, 32, 64, 128, 256 and 512, not {shape.head_dim}"
        if shape.head_dim == 512 and shape.dtype == torch.float32:
            return "heads of 512 do not fit into the kernels' memory in float32: give --dtype bfloat16"
        if shape.group > _MOST_HEADS:
            return f"the kernels know at most {_MOST_HEADS} query heads for a KV head, not {shape.group}"
        if shape.codes and device.type == "cuda" and torch.cuda.get_device_capability(device) < _ADA:
            return "8-bit floats as --kv-dtype came with compute capability 8.9, which the GPU has not"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU the kernels run only in Triton's interpreter (TRITON_INTERPRET=1), for tests"
    return None


def _reads_codes(shape: AttentionShape, asked: str) -> bool:
    """Whether FlashInfer gets keys in fp8, widened: for prompts alone."""
    return asked == "auto" and shape.windows == [None]


def _flashinfer_obstacle(shape: AttentionShape, device: torch.device, reads_codes: bool) -> str | None:
    """Say why FlashInfer cannot serve this model here, compiled or not; None: it can."""
    if device.type != "cuda":
        return "it runs on CUDA devices only"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    if shape.dtype == torch.float32:
        return "it does not compute in float32: give --dtype bfloat16 or float16"
    if shape.whole:
        return "tokens of a picture see those behind them, which it is not given"
    if shape.codes and not reads_codes:
        return "it is not given keys and values in fp8"
    if shape.value_dim is not None:
        return "it is not given layers with latents"
    if shape.head_dim not in (64, 128, 256):
        return f"it knows head sizes 64, 128 and 256, not {shape.head_dim}"
    if not all(spec.plain and spec.scale == shape.head_dim**-0.5 for spec in shape.specs):
        return "the model has soft-capped scores, sinks or another scale, which it is not given"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package is not installed: pip install flashinfer-python"
    return None


def _import_fault() -> str | None:
    """Say why the parts of FlashInfer that are used cannot be imported; None: they can."""
    for part in ("flashinfer", "flashinfer.jit", "flashinfer.jit.env", *_LOADERS.values()):
        try:
            import_module(part)
        except Exception as error:  # RuntimeError if its parts do not match; a damaged one may raise any
            return f"{part} cannot be imported ({type(error).__name__}: {error}); {_REINSTALL}"
    return None


def _load_fault(kernels: "list[_Kernel]") -> str | None:
    """Load compiled kernels. Returns why that fails; None: it does not.

    FlashInfer reads templates of its sources even for compiled kernels. An installation without them
    can be imported, and would end the server at its first step.
    """
    for kernel in kernels:
        try:
            getattr(import_module(_LOADERS[kernel.kind]), f"get_batch_{kernel.kind}_module")(
                *kernel.args
            )
        except Exception as error:  # whatever is broken there, Triton's kernels are not
            return f"its kernels cannot be loaded ({type(error).__name__}: {error}); {_REINSTALL}"
    return None


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == _HOPPER


def _kind(shape: AttentionShape) -> str:
    window = ", sliding windows" if any(shape.windows) else ""
    return f"{str(shape.dtype).removeprefix('torch.')}, head size {shape.head_dim}{window}"


class _Kernel(NamedTuple):
    """A module of FlashInfer's: `kind` is "prefill" or "decode"."""

    kind: str
    args: tuple[Any, ...]


_LOADERS = {"prefill": "flashinfer.prefill", "decode": "flashinfer.decode"}
_REINSTALL = "install flashinfer-python again"


def _kernels(extend: str, decode: str, shape: AttentionShape) -> list[_Kernel]:
    """List the kernels that would run."""
    found, dtype = [], shape.dtype
    for windowed in {window is not None for window in shape.windows}:
        common = (dtype, dtype, dtype, torch.int32, shape.head_dim, shape.head_dim, 0, windowed, False)
        found.append(_Kernel("prefill", (extend, *common, False)))
        if decode == "flashinfer":  # its tensor-core decode is its FA2 prefill
            found.append(_Kernel("prefill", ("fa2", *common, False)))
            found.append(_Kernel("decode", common))
    return found


def _is_built(kernel: _Kernel) -> bool:
    """Whether a module needs no compiler: it was shipped, or compiled by an earlier start."""
    module = getattr(import_module("flashinfer.jit"), f"get_batch_{kernel.kind}_uri")(*kernel.args)
    env = import_module("flashinfer.jit.env")
    library = f"{module}/{module}.so"
    if (env.FLASHINFER_AOT_DIR / library).exists():
        return True
    return (env.FLASHINFER_JIT_DIR / library).exists() and _can_build()  # ninja checks that it is new


def _can_build() -> bool:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or os.path.exists(os.path.join(home, "bin", "nvcc"))
    return bool(nvcc) and shutil.which("ninja") is not None
