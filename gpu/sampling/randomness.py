"""Random numbers as a function of (seed, index) alone.

Counter-based (Salmon et al. 2011): no state, so a request's numbers do not depend on its
neighbours, on the order of steps or on a retraction. Each output token needs one number, and the
host knows its index before the step runs.
"""

import numpy as np
import numpy.typing as npt


def uniforms(seeds: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Compute a number in [0, 1) for each pair, a multiple of 2**-53."""
    keys = mix(seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    counters = indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = mix(mix(keys + counters) ^ keys)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele et al. 2014): an input bit flips half the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
