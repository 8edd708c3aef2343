"""exp and functions of it, on vectors: the same steps on every machine. NaN stays NaN."""

from ramify.gpu.native.ir import F32, I32, LANES, Function, IrValue, vector

_LOW, _HIGH = -87.3, 88.0
_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860677e-6
_ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to a whole number
_ROUND_BITS = 0x4B400000
_TAYLOR = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)  # error below 2e-7 up to ln(2) / 2


def rounded(x: IrValue) -> IrValue:
    """Round to the nearest int32, for |x| < 2^22. Undefined, but harmless, for others."""
    return (x + _ROUND).bits_as(vector(I32, LANES)) - _ROUND_BITS


def exp(f: Function, x: IrValue) -> IrValue:
    """Compute e^x, to about 2e-7 relative; 0 below the range of float32, about its largest above."""
    tiny = x < _LOW
    x = f.select(tiny, f.like(f.constant(F32, _LOW), x), x)
    x = f.select(x > _HIGH, f.like(f.constant(F32, _HIGH), x), x)
    whole = f.fma(x, f.like(_LOG2E, x), f.like(_ROUND, x))
    n = whole - _ROUND
    rest = f.fma(n, f.like(-_LN2_HIGH, x), x)
    rest = f.fma(n, f.like(-_LN2_LOW, x), rest)
    total = f.like(_TAYLOR[0], x)
    for factor in _TAYLOR[1:]:
        total = f.fma(total, rest, f.like(factor, x))
    power = (whole.bits_as(vector(I32, LANES)) - (_ROUND_BITS - 127)) << 23
    return f.select(tiny, f.like(f.constant(F32, 0.0), x), total * power.bits_as(vector(F32, LANES)))


def silu(f: Function, x: IrValue) -> IrValue:
    """Compute x / (1 + e^-x)."""
    return x / (exp(f, f.like(0.0, x) - x) + 1.0)


def tanh(f: Function, x: IrValue) -> IrValue:
    """Compute 1 - 2 / (e^2x + 1)."""
    return f.like(1.0, x) - f.like(2.0, x) / (exp(f, x * 2.0) + 1.0)


def gelu_tanh(f: Function, x: IrValue) -> IrValue:
    """Compute the tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
    inner = f.fma(x * x * x, f.like(0.044715, x), x) * 0.7978845608028654
    return x * 0.5 * (tanh(f, inner) + 1.0)
