"""The choice of kernels for a step's matrix products, and of their tilings.

The tables below are measurements (docs/log/gpu.md). A product runs on our kernel where that was faster
in a CUDA graph on an H200, counting the kernels that it replaces. Everything else stays with torch's
library: float32 and float16, sizes that the tiles do not divide, more tokens than `MOST_TOKENS` except
for the gated product, GPUs before Hopper.
"""

from dataclasses import dataclass, replace

import torch

# The four products of a layer with the kernels that ours replace, microseconds on an H200, ours /
# cuBLAS; at 128 and 256 tokens ours is the best tiling that a search found:
#   tokens         8            32           64           128          256
#   Qwen3-0.6B     20.5 / 27.2  22.0 / 27.4  22.7 / 28.0  32.5 / 29.4  36.0 / 32.8
#   Llama-3.1-8B   118 / 124    122 / 129    134 / 136    159 / 147    221 / 193
MOST_TOKENS = 64
GROUP_TOKENS = 64  # that a warp group multiplies: the rows of wgmma
_OUTPUTS = 64  # rows of a weight tile: the least of a tensor core product
_LARGE = 1 << 25  # weights of a projection from which on reading them takes nearly all the time
_MOST_HELD = 512  # inputs in the ring of stages of the Gluon kernel
# Where codes of 8 bits are widened, by the tokens of a tile; more outputs are cut into wide tiles at 64
_PROGRAMS_OF_16, _PROGRAMS_OF_32, _PROGRAMS_OF_64 = 768, 528, 256
_WIDE_OUTPUTS = 4096
_FEW_OUTPUTS = 2048  # of a gated product that has too few programs to hide how long bytes take to come
_PROGRAMS = 128  # about the multiprocessors; with fewer tiles their inputs are split


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile of a program of `triton_linear`, and how many programs share the columns of one tile."""

    tokens: int
    outputs: int
    inputs: int  # of one step of the loop
    splits: int = 1  # programs that share a tile's inputs
    stages: int = 4
    warps: int = 4
    swap: bool = True  # multiply W x^T, so that the weights take the 64 rows of the tensor cores
    prefetch: int = 256  # inputs of each weight row to ask for ahead of the kernel before


@dataclass(frozen=True, slots=True)
class GluonTiling:
    """A tile of a program of the Gluon kernel, and how many stages are in flight."""

    groups: int  # warp groups, each with GROUP_TOKENS tokens
    outputs: int  # rows of the weight; of a gated product half of them the gate's
    inputs: int  # of one stage
    stages: int
    band: int = 8  # blocks of tokens that take a column tile's weights together


@dataclass(frozen=True, slots=True)
class FourBitTiling:
    """A tile of weights in 4 bits. `outputs`: in a gated product half of them are the gate's."""

    tokens: int
    outputs: int
    warps: int
    stages: int
    splits: int = 0  # programs that share a tile's inputs; 0: as many as fill the GPU
    sums: int = 16  # tokens up to which scales multiply sums, and else weights


@dataclass(frozen=True, slots=True)
class FragmentTiling:
    """A tile in the package's layout: `warps` and `splits` share the inputs of a tile."""

    warps: int
    splits: int
    outputs: int = 64


AnyTiling = Tiling | GluonTiling | FourBitTiling | FragmentTiling


@dataclass(frozen=True, slots=True)
class OpTilings:
    """The tiling of the product in each operation; None: torch's library computes it."""

    linear: AnyTiling | None = None
    add: Tiling | None = None
    gated: AnyTiling | None = None


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The products' sizes, and which kernels the device can run."""

    hidden: int
    attention: int  # width of the attention's output
    qkv: int
    intermediate: int
    dtype: torch.dtype
    overlaps: bool  # programmatic dependent launch, which comes with the tensor cores it needs
    gluon: bool = False  # the Gluon kernel runs on the device


# Of the gated product on Gluon, up to so many tokens; None: the table above, or the library. Where the
# library stays, its tiles fill the multiprocessors better. Microseconds of it with the activation,
# ours / cuBLAS (at 64 tokens / the kernel above), on an H200:
#   tokens         64         128        256        512          1024         2048         8192
#   Qwen3-0.6B     6.5 / 6.9  6.4 / 8.4  8.4 / 10.2 13.0 / 15.2  20.6 / 25.3  38.3 / 48.4  155 / 185
#   Llama-3.1-8B   62 / 64.3  67 / 72    93 / 99    168 / 170    340 / 349    659 / 694    2840 / 3027
_FEW, _MORE, _MANY = GluonTiling(1, 128, 64, 8), GluonTiling(2, 128, 64, 6), GluonTiling(2, 256, 64, 4)
_LARGE_GLUON = (
    (32, None),
    (64, _FEW),
    (128, _MANY),
    (232, None),
    (256, _MANY),
    (416, None),
    (832, _MORE),
)
_SMALL_GLUON = ((32, None), (768, _FEW), (1536, _MORE))


def tilings_for(tokens: int, sizes: LayerSizes) -> OpTilings:
    """Choose the kernel of each product in a step of `tokens`."""
    tilings = _tilings_for(tokens, sizes)
    gluon = _gluon_for(tokens, sizes)
    return tilings if gluon is None else replace(tilings, gated=gluon)


def _gluon_for(tokens: int, sizes: LayerSizes) -> GluonTiling | None:
    if not sizes.gluon or sizes.dtype != torch.bfloat16:
        return None
    if sizes.hidden < _MOST_HELD or sizes.hidden % 128 or sizes.intermediate % 128:
        return None
    table = _LARGE_GLUON if sizes.hidden * sizes.intermediate >= _LARGE else _SMALL_GLUON
    return next((tiling for most, tiling in table if tokens <= most), _MANY)


def _tilings_for(tokens: int, sizes: LayerSizes) -> OpTilings:
    if not sizes.overlaps or sizes.dtype != torch.bfloat16 or tokens > MOST_TOKENS:
        return OpTilings()
    others = sizes.attention, sizes.qkv, sizes.intermediate
    if sizes.hidden % 128 or any(size % _OUTPUTS for size in others):
        return OpTilings()
    rows = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    # Long reads keep pace with 64 tokens a tile. Short ones want more programs: `output` of
    # Qwen3-0.6B takes 6.0 us at 64 tokens in tiles of 32, 9.9 in tiles of 64.
    if rows == 64 and sizes.hidden * sizes.intermediate >= _LARGE:
        whole = Tiling(64, _OUTPUTS, 256, stages=3)
        gated = Tiling(64, _OUTPUTS, 64, stages=5, prefetch=0)
    else:
        whole = Tiling(min(32, rows), _OUTPUTS, 128, stages=6)
        gated = Tiling(rows, _OUTPUTS, 128)
    tiles = -(-sizes.hidden // _OUTPUTS) * -(-tokens // whole.tokens)
    splits = max(1, min(8, _PROGRAMS // tiles))
    shared = replace(whole, splits=1 << (splits.bit_length() - 1))
    return OpTilings(whole, shared, gated)


def split(tiling: AnyTiling | None, tokens: int, shape: tuple[int, int]) -> AnyTiling | None:
    """Split the inputs among programs where outputs are few. shape: outputs, inputs."""
    if not isinstance(tiling, Tiling):
        return tiling
    outputs, inputs = shape
    tiles = -(-outputs // tiling.outputs) * -(-tokens // tiling.tokens)
    splits = max(1, min(4, _PROGRAMS // tiles, inputs // tiling.inputs))  # 8 are slower
    return replace(tiling, splits=1 << (splits.bit_length() - 1))


def few_tiling(tokens: int, shape: tuple[int, int], gated: bool, grouped: bool) -> Tiling | None:
    """Choose the tiling of a product with codes of 8 bits; None: too many tokens, or no tiling.

    shape: outputs, inputs. `grouped`: 128 inputs share a scale. Up to 32 tokens programs of two warps:
    what widens codes is done by threads that wait for nothing but their own, and four programs or more
    are on a multiprocessor. Measured on an H200 (docs/log/gpu.md).
    """
    outputs, inputs = shape
    if tokens > MOST_TOKENS or outputs % _OUTPUTS or inputs % 128:
        return None
    if tokens > 32:
        wide = outputs > _WIDE_OUTPUTS and outputs % 128 == 0
        tiling = Tiling(64, 128 if wide else 64, 128, 1, 3 if wide else 4, 8 if gated and wide else 4)
        most = _PROGRAMS_OF_64
    elif gated and not grouped and inputs % 256 == 0 and (tokens <= 16 or outputs <= _FEW_OUTPUTS):
        return _gated_codes(16 if tokens <= 16 else 32, outputs)
    else:
        tiling = Tiling(16 if tokens <= 16 else 32, _OUTPUTS, 128, warps=2)
        most = _PROGRAMS_OF_16 if tokens <= 16 else _PROGRAMS_OF_32
    most = min(8, most * tiling.outputs // outputs, inputs // 512)  # four steps or more for each
    splits = 1 if gated else max(1, most)
    return replace(tiling, splits=1 << (splits.bit_length() - 1))


def _gated_codes(tokens: int, outputs: int) -> Tiling:
    if outputs <= _FEW_OUTPUTS:
        return Tiling(tokens, _OUTPUTS, 256, stages=6)
    return Tiling(tokens, _OUTPUTS, 256, stages=3, warps=2)


# Up to so many tokens, of matrices with few and with many outputs, as measured on an H200; of more
# tokens the library multiplies, with weights that are widened first
_FOUR_BITS = (
    (16, FourBitTiling(16, 128, 8, 6), FourBitTiling(16, 64, 4, 6)),
    (32, FourBitTiling(32, 64, 4, 4, sums=32), FourBitTiling(32, 128, 4, 5, sums=32)),
    (64, FourBitTiling(64, 64, 4, 4, sums=64), FourBitTiling(64, 128, 8, 4, sums=64)),
    (128, FourBitTiling(64, 128, 8, 4, sums=64), FourBitTiling(64, 128, 8, 4, sums=64)),
    (256, FourBitTiling(128, 128, 8, 4, sums=128), FourBitTiling(128, 128, 8, 4, sums=128)),
)
_MANY_OUTPUTS = 16384
_MOST_FRAGMENTS = 1  # tokens: two and four were not timed, eight are level with the package
_LEAST_FRAGMENTS = 4096  # outputs and inputs
FOUR_BITS_INVARIANT = FourBitTiling(64, 64, 4, 4, 1)  # the same for any number of tokens
_FOUR_BITS_EXACT = FourBitTiling(16, 32, 4, 2)  # float32, which tensor cores do not do


def four_bit_tiling(tokens: int, outputs: int, dtype: torch.dtype) -> FourBitTiling | None:
    """Choose the tiling of a product with weights in 4 bits; None: too many tokens."""
    if dtype == torch.float32:
        return _FOUR_BITS_EXACT
    pair = next((tilings for most, *tilings in _FOUR_BITS if tokens <= most), None)
    return None if pair is None else pair[outputs >= _MANY_OUTPUTS]


def fragment_tiling(tokens: int, shape: tuple[int, int]) -> FragmentTiling | None:
    """Choose the tiling in the layout of tensor cores; None: too many tokens, or a small matrix.

    shape: outputs, inputs. As measured on an H200 for one token of Llama-8B's products.
    """
    if tokens > _MOST_FRAGMENTS or min(shape) < _LEAST_FRAGMENTS:
        return None
    return FragmentTiling(8, 1 if shape[0] >= _MANY_OUTPUTS else 4)
