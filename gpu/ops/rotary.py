"""Rotary position embedding (Su et al. 2021) with every scaling that `transformers` knows.

The angle of a position depends on the position alone, never on the present length of a sequence: a key
is rotated once, then cached and shared by sequences of different lengths, and a cold run must equal a
warm one. The formulas of `dynamic` and `longrope` contain the length, so the served context length is
put in (as vLLM does). Served up to the pretrained length the result is that of `transformers`; served
beyond it, that of `transformers` for a full context, in short sequences too.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ramify.protocol.errors import ModelError

RopeSettings = dict[str, Any]


def inverse_frequencies(rope: RopeSettings, dim: int, context: int) -> tuple[Tensor, float]:
    """Compute float32[dim / 2] and the factor on cos and sin. Raises ModelError on a missing field."""
    kind = rope["rope_type"]
    if kind not in _SCALINGS:
        raise ModelError(
            f"config.json: rope_type {kind!r} is not supported: one of {', '.join(_SCALINGS)}"
        )
    try:
        return _SCALINGS[kind](rope, dim, context)
    except KeyError as error:
        raise ModelError(f"config.json: rope_type {kind!r} needs the field {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"config.json: the fields of rope_type {kind!r} are wrong: {error}") from None


class Rotary:
    """cos and sin for the positions of one step, computed once and used by all layers."""

    def __init__(self, rope: RopeSettings | None, dim: int, context: int, device: torch.device) -> None:
        """`rope`: None: no positions, every angle is 0.

        Where a part of each head is rotated (`partial_rotary_factor`), the rest has angles of 0 too.
        Kernels know one order of a head, in which its halves rotate together. So values of heads have to
        be brought into `order`: both halves of the part to the beginnings of the halves.
        """
        self.order: Tensor | None = None
        turned = 0 if rope is None else int(dim * rope.get("partial_rotary_factor", 1))
        if rope is not None and rope["rope_type"] == "proportional":
            turned = dim  # its frequencies say what does not turn
        frequencies, factors = torch.zeros(dim // 2), torch.ones(dim // 2)
        if rope is not None and turned:
            frequencies[: turned // 2], factor = inverse_frequencies(rope, turned, context)
            factors[: turned // 2] = factor
        if 0 < turned < dim:
            part, rest = torch.arange(turned).view(2, -1), torch.arange(turned, dim).view(2, -1)
            self.order = torch.cat((part, rest), 1).flatten()
        # which of a token's three positions turns each pair (M-RoPE, interleaved)
        self.axes = torch.zeros(dim // 2, dtype=torch.int64, device=device)
        for axis, size in enumerate(() if rope is None else rope.get("sections", ())):
            if axis:
                self.axes[axis : 3 * size : 3] = axis
        self._factors = None if bool((factors == 1).all()) else factors.to(device)
        self._frequencies = frequencies.to(device)
        self._half = dim // 2
        self.dim = dim

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute (cos, signed sin), [T, 1, D] each, of positions int64[T], or int64[3, T] (M-RoPE).

        The first half of the sine is negated, so that rotating needs no negation of its own.
        """
        turns = positions.float()
        turns = turns[:, None, None] if turns.dim() == 1 else turns[self.axes].t()[:, None]
        angles = turns * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._factors is not None:
            cos, sin = cos * self._factors, sin * self._factors
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cos and sin, float32[T, D / 2] each, as `triton_layer.rope_store` reads them."""
        cos, signed_sin = self.angles(positions, torch.float32)
        return cos[:, 0, : self._half].contiguous(), signed_sin[:, 0, self._half :].contiguous()

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, D], by the convention of halves (as in GPT-NeoX), in three kernels."""
        return torch.addcmul(x * cos, x.roll(self._half, -1), sin)


def heads_in_order(order: Tensor, heads: int) -> Tensor:
    """Repeat the order of a head's values for so many heads."""
    starts = torch.arange(heads) * len(order)
    return (starts[:, None] + order).flatten()


def _default(rope: RopeSettings, dim: int, context: int) -> tuple[Tensor, float]:
    return 1.0 / (rope["rope_theta"] ** _exponents(dim)), 1.0


def _linear(rope: RopeSettings, dim: int, context: int) -> tuple[Tensor, float]:
    frequencies, factor = _default(rope, dim, context)
    return frequencies / rope["factor"], factor


def _dynamic(rope: RopeSettings, dim: int, context: int) -> tuple[Tensor, float]:
    """Scale as NTK-aware scaling does; no change up to the pretrained length."""
    pretrained, factor = rope["max_position_embeddings"], rope["factor"]
    length = max(context, pretrained)
    stretch = factor * length / pretrained - (factor - 1)
    base = rope["rope_theta"] * stretch ** (dim / (dim - 2))
    return 1.0 / (base ** _exponents(dim)), 1.0


def _yarn(rope: RopeSettings, dim: int, context: int) -> tuple[Tensor, float]:
    """Scale as YaRN (Peng et al. 2023): interpolate low frequencies, keep high ones, a ramp between."""
    base, pretrained = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope["factor"] or rope["max_position_embeddings"] / pretrained

    def dimension(rotations: float) -> float:
        return (dim * math.log(pretrained / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = base ** _exponents(dim)
    kept = 1 - ramp  # how much of the own frequency stays
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_attention_factor(rope, factor)


def _proportional(rope: RopeSettings, dim: int, context: int) -> tuple[Tensor, float]:
    """Scale as Gemma 4: keep the first frequencies of the whole head, the others are 0."""
    frequencies, factor = _default(rope, dim, context)
    turned = int(rope.get("partial_rotary_factor", 1) * dim // 2)
    frequencies[turned:] = 0
    return frequencies / rope.get("factor", 1), factor


def yarn_scale(factor: float, weight: float) -> float:
    """Compute by how much queries, and keys, grow where positions are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(rope: RopeSettings, factor: float) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all)
    return yarn_scale(factor, 1.0)


def _longrope(rope: RopeSettings, dim: int, context: int) -> tuple[Tensor, float]:
    """Scale as LongRoPE (Ding et al. 2024): factors by frequency, a set for short and one for long."""
    pretrained = rope["original_max_position_embeddings"]
    factors = torch.tensor(rope["long_factor" if context > pretrained else "short_factor"])
    if factors.shape != (dim // 2,):
        raise ValueError(f"{len(factors)} factors for {dim // 2} frequencies")
    scale = rope.get("factor") or rope["max_position_embeddings"] / pretrained
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(pretrained))
    frequencies = 1.0 / (factors.float() * rope["rope_theta"] ** _exponents(dim))
    return frequencies, float(attention_factor)


def _llama3(rope: RopeSettings, dim: int, context: int) -> tuple[Tensor, float]:
    """Scale as Llama 3.1: divide low frequencies by the factor, keep high ones, blend between."""
    frequencies, attention_factor = _default(rope, dim, context)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    pretrained = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (pretrained / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > pretrained / low, frequencies / factor, blended)
    return torch.where(wavelengths < pretrained / high, frequencies, scaled), attention_factor


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


_SCALINGS: dict[str, Callable[[RopeSettings, int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
