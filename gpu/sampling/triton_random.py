"""The random numbers of `sampling.randomness`, bit for bit, in a kernel.

Which output token a line draws is known on the device only once drafts may have been refused.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import triton
import triton.language as tl


@triton.jit
def uniform(seeds, indices):
    """Compute `randomness.uniforms`: seeds, indices int64[N] -> float64[N] in [0, 1)."""
    step = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    keys = _mix(seeds.to(tl.uint64) + step)
    bits = _mix(_mix(keys + indices.to(tl.uint64) * step) ^ keys)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * tl.full([1], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([1], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)
