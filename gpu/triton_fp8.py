"""8-bit floats (e4m3) in Triton's kernels: codes as the floats that they stand for.

Called from kernels only.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import os

import triton
import triton.language as tl

_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")

# Two bytes become two bfloat16: a code's exponent and mantissa lie in these where a power of 2 is
# missing, 120, with which they are multiplied. Triton's own way is conversions one by one: three slow
# instructions for two codes, which take longer than memory delivers them.
_PAIR = """{
.reg .b32 low, most, zero, a;
prmt.b32 low, 0, CODES, 0xBYTES;
mov.b32 most, 0x7b807b80;
mov.b32 zero, 0x80008000;
and.b32 a, low, 0x7f007f00;
shr.b32 a, a, 4;
lop3.b32 a, a, low, zero, 0xf8;
fma.rn.bf16x2 WIDE, a, most, zero;
}"""


def _pair(wide: str, codes: str, chosen: str) -> str:
    return _PAIR.replace("WIDE", wide).replace("CODES", codes).replace("BYTES", chosen)


_TWO = tl.constexpr(_pair("$0", "$1", "5040"))
_FOUR = tl.constexpr("{" + _pair("$0", "$2", "5040") + _pair("$1", "$2", "7060") + "}")


@triton.jit
def widened(
    codes, dtype: tl.constexpr, WHERE_THEY_ARE: tl.constexpr = False, PAIRS: tl.constexpr = False
):  # fmt: skip
    """Widen loaded values to `dtype`. Codes that are NaN may become a number.

    WHERE_THEY_ARE: in the threads that loaded them, else in those that multiply them. PAIRS: a thread
    holds two neighbours at a time, as of the weights in products of four warps; else four or more.
    """
    if _COMPILED and codes.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        raw = codes.to(tl.uint8, bitcast=True)
        if PAIRS:
            wide = tl.inline_asm_elementwise(
                _TWO, "=r,r", [raw], dtype=tl.bfloat16, is_pure=not WHERE_THEY_ARE, pack=2
            )  # fmt: skip
        else:
            wide = tl.inline_asm_elementwise(
                _FOUR, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=not WHERE_THEY_ARE, pack=4
            )  # fmt: skip
    else:
        wide = codes.to(dtype)
    return wide


_HALVES = tl.constexpr("""{
.reg .b32 t;
.reg .b16 low, high;
prmt.b32 t, $2, 0, 0x3120;
mov.b32 {low, high}, t;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def halves(words):
    """Widen int16 words of two codes to float16: those of the lower bytes, and those of the higher."""
    if _COMPILED:
        low, high = tl.inline_asm_elementwise(
            _HALVES, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip
    else:
        low = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def scale_of(largest):
    """Compute the scale of codes from the largest magnitude among the values: value = code * scale."""
    return tl.maximum(largest, 1e-12) / 448.0


@triton.jit
def narrowed(values):
    """Round float32 `values` to the nearest codes. (Triton's interpreter would truncate.)"""
    values = tl.clamp(values, -448.0, 448.0)
    if not _COMPILED:
        bits = values.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        least = (values + 24576.0) - 24576.0  # 1.5 * 2^14: multiples of 2^-9 are left
        values = tl.where(tl.abs(values) < 0.015625, least, even.to(tl.float32, bitcast=True))
    return values.to(tl.float8e4nv)
