"""The number formats in which checkpoints store the weights of products.

Reads `quantization_config`, whose spellings differ by the tool that made a checkpoint. A format is a
class with the methods of `WeightFormat`, in a file of its own, and a line in `_METHODS`.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ramify.gpu.ops.linear import four_bit_checkpoints
from ramify.gpu.ops.linear.base import Weight
from ramify.gpu.ops.linear.fp8 import GROUP, Fp8Format


class WeightFormat(Protocol):
    """Interface: a format of weights that are stored as several tensors; others are floats."""

    @property
    def name(self) -> str:
        """The name, as of `--quantization`."""
        ...

    def part(self, name: str, tensor: Tensor) -> tuple[str, str] | None:
        """Find the weight of the tensor `name`, and which part of it that is. None: it is no part.

        A tensor whose part is empty is ignored.
        """
        ...

    def missing(self, parts: Collection[str]) -> str | None:
        """Say which parts a weight with these parts lacks; None: none."""
        ...

    def check(self, parts: dict[str, Tensor], shape: tuple[int, int]) -> None:
        """Check shapes and dtypes as `weight` does. Matrices may be on the meta device."""
        ...

    def weight(self, parts: dict[str, Tensor], shape: tuple[int, int]) -> Weight:
        """Make the weight of `shape`: outputs, inputs. Raises ValueError, which says what is wrong."""
        ...


def read_format(raw: Any) -> WeightFormat:
    """Read a `quantization_config`. Raises ValueError, which says what is not supported."""
    if not isinstance(raw, dict):
        raise ValueError("(of an unknown method) is no object")
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        shown = str(method or "of an unknown method")
        raise ValueError(f"({shown:.40}) is not supported: give a checkpoint in "
                         "float32, bfloat16, float16, fp8, AWQ or GPTQ")  # fmt: skip
    return _METHODS[method](raw)


def _object(raw: Any, name: str) -> dict[str, Any]:
    found = raw.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"has {name} {found!r:.40}: must be an object")
    return found


def _blocks(size: Any) -> bool:
    if size is not None and size != [GROUP, GROUP]:
        raise ValueError(f"has blocks of {size!r:.40}: only {[GROUP, GROUP]} are supported")
    return size is not None


def _fp8(raw: dict[str, Any]) -> WeightFormat:
    """Read the config of DeepSeek's, Qwen's and AutoFP8's checkpoints."""
    if raw.get("fmt") not in (None, "e4m3"):
        raise ValueError(f"has fmt {raw['fmt']!r:.40}: only e4m3 is supported")
    return Fp8Format(_blocks(raw.get("weight_block_size")))


def _fbgemm(raw: dict[str, Any]) -> WeightFormat:
    return Fp8Format(blocks=False)


def _modelopt(raw: dict[str, Any]) -> WeightFormat:
    """Read ModelOpt's config, in config.json or as hf_quant_config.json has it."""
    inner = raw.get("quantization")
    kind = (inner if isinstance(inner, dict) else raw).get("quant_algo")
    if not isinstance(kind, str) or kind not in _MODELOPT:
        raise ValueError(
            f"(modelopt) has quant_algo {kind!r:.40}: only {', '.join(_MODELOPT)} are supported"
        )
    return Fp8Format(_MODELOPT[kind])


_MODELOPT = {"FP8": False, "FP8_PER_CHANNEL_PER_TOKEN": False, "FP8_PB_WO": True}


def _compressed(raw: dict[str, Any]) -> WeightFormat:
    """Read compressed-tensors' config: groups of layers, which must be of one kind."""
    if raw.get("format") == "pack-quantized":
        return _four_bits(four_bit_checkpoints.compressed, raw)
    groups = _object(raw, "config_groups")
    kinds = [
        _object(groups[name], "weights") if isinstance(groups[name], dict) else {} for name in groups
    ]
    found = [(each.get("type"), each.get("num_bits"), each.get("strategy")) for each in kinds]
    if not found or len({strategy == "block" for _, _, strategy in found}) > 1:
        raise ValueError("has config_groups of several kinds, or none: only one is supported")
    for kind, bits, strategy in found:
        if (kind, bits) != ("float", 8) or strategy not in ("tensor", "channel", "block"):
            raise ValueError(f"(compressed-tensors) has weights of {bits!r:.40} bits, type "
                             f"{kind!r:.40}, strategy {strategy!r:.40}: only floats of 8 bits by "
                             "tensor, channel or block are supported")  # fmt: skip
    sizes = [_blocks(each.get("block_structure")) for each in kinds]
    return Fp8Format(any(sizes))


def _four_bits(read: Callable[[dict[str, Any]], WeightFormat], raw: dict[str, Any]) -> WeightFormat:
    try:
        return read(raw)
    except ValueError as error:
        raise ValueError(f"({raw['quant_method']}) {error}") from None


_METHODS: dict[str, Callable[[dict[str, Any]], WeightFormat]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fbgemm,
    "awq": partial(_four_bits, four_bit_checkpoints.awq),
    "gptq": partial(_four_bits, four_bit_checkpoints.gptq),
    "mxfp4": four_bit_checkpoints.mxfp4,
    "torchao": partial(_four_bits, four_bit_checkpoints.torchao),
    "modelopt": _modelopt,
    "modelopt_fp8": _modelopt,
}
