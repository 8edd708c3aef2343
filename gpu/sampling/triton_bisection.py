"""The search for the key at which a count or a mass is reached: a bisection on its bits, in a program.

A key is the bit pattern of a float x >= 0; such patterns order as the floats do. Its token weighs
exp(-x). The keys of a line lie one after another in memory, unsorted. Each pass over them counts at
three cuts.

It does not know logits, nor where the keys come from: `triton_truncation` does.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import triton
import triton.language as tl


@triton.jit
def weights_of(keys):
    """Compute exp(-x) of the keys' floats x."""
    return tl.exp(-keys.to(tl.float32, bitcast=True))


@triton.jit
def range_of(keys, length, BLOCK: tl.constexpr):
    """Find the least and the greatest key."""
    low = tl.full([BLOCK], 0x7F800000, tl.int32)
    high = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        low = tl.minimum(low, tl.load(keys + at, mask=at < length, other=0x7F800000))
        high = tl.maximum(high, tl.load(keys + at, mask=at < length, other=0))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def bisect(keys, length, above, target, low, high, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest key in [low, high] with above + (what is below it) < target; at least `low`."""
    while low < high:
        # three cuts a pass over the keys
        quarter = (high - low) // 4 + 1
        one = tl.minimum(low + quarter, high)
        two = tl.minimum(one + quarter, high)
        three = tl.minimum(two + quarter, high)
        first = tl.zeros([BLOCK], tl.float64)
        second = tl.zeros([BLOCK], tl.float64)
        third = tl.zeros([BLOCK], tl.float64)
        for start in range(0, length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            key = tl.load(keys + at, mask=at < length, other=2147483647)
            weight = tl.full([BLOCK], 1.0, tl.float64)
            if BY_MASS:
                weight = tl.where(at < length, weights_of(key), 0.0).to(tl.float64)
            first += tl.where(key < one, weight, 0.0)
            second += tl.where(key < two, weight, 0.0)
            third += tl.where(key < three, weight, 0.0)
        if above + tl.sum(third, 0) < target:
            low = three
        elif above + tl.sum(second, 0) < target:
            low, high = two, three - 1
        elif above + tl.sum(first, 0) < target:
            low, high = one, two - 1
        else:
            high = one - 1
    return low


@triton.jit
def mass_below(keys, length, end, BLOCK: tl.constexpr):
    """Sum the weights of the keys below `end`, in float64."""
    total = tl.zeros([], tl.float64)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = tl.load(keys + at, mask=at < length, other=2147483647)
        total += tl.sum(tl.where((at < length) & (key < end), weights_of(key), 0.0).to(tl.float64), 0)
    return total
