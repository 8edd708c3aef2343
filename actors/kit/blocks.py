"""Hashes of token blocks, chained: one number for all tokens from a branch's start to a block's end.

For each block k of `size` tokens t, with odd 64-bit weights w and a multiplier m, modulo 2^64:

    state[k] = m * (state[k - 1] + mix(g + sum of t[i] * w[i])),    state[-1]: of the namespace

`mix` is the finalizer of SplitMix64 (Steele, Lea and Flood 2014). The chain is linear in what is
mixed, so all blocks of a prompt are hashed by a few numpy operations (m is odd: its powers can be
divided out), and a chain goes on from any state. It is no cryptographic hash: who uses it only
guesses by it.

Does not know trees, caches or replicas.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from ramify.protocol.cluster import BLOCK

Hashes = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.int32]

NO_HASHES: Hashes = np.empty(0, dtype=np.uint64)
_MASK = (1 << 64) - 1
_M = 0xD6E8FEB86659FD93  # odd
_RUN = 1024  # blocks that are chained at once
_SHORT = 8  # blocks that are chained one by one: quicker than numpy
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_G = np.uint64(0x9E3779B97F4A7C15)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)


@lru_cache(maxsize=4096)
def seed(namespace: str) -> int:
    """The state before a branch's first block."""
    return int.from_bytes(blake2b(namespace.encode(), digest_size=8).digest(), "little")


def _powers(base: int, count: int) -> Hashes:
    found = np.empty(count, dtype=np.uint64)
    value = 1
    for i in range(count):
        value = value * base & _MASK
        found[i] = value
    return found


def _weights(count: int) -> Hashes:
    state = mix(np.arange(1, count + 1, dtype=np.uint64) * _G)
    return state | np.uint64(1)


def mix(x: Hashes) -> Hashes:
    """Numbers that look random, each a function of one of `x`."""
    x = x ^ (x >> _S1)
    x *= _C1
    x ^= x >> _S2
    x *= _C2
    x ^= x >> _S3
    return x


_UP = _powers(_M, _RUN)  # m^1, m^2, ...
_DOWN = np.concatenate(([np.uint64(1)], _powers(pow(_M, -1, 1 << 64), _RUN - 1)))  # m^0, m^-1, ...


class BlockHasher:
    """`size`: tokens of a block."""

    def __init__(self, size: int = BLOCK) -> None:
        if size < 1:
            raise ValueError(f"a block of {size} tokens: must be at least 1")
        self.size = size
        self._weights = _weights(size)

    def chain(self, state: int, tokens: Tokens) -> Hashes:
        """The states behind each whole block of `tokens`: uint64[len(tokens) // size]."""
        return self.chains([(state, tokens)])[0]

    def chains(self, runs: Sequence[tuple[int, Tokens]]) -> list[Hashes]:
        """As `chain`, for several runs with a few numpy calls in all."""
        size = self.size
        counts = [len(tokens) // size for _, tokens in runs]
        if not any(counts):
            return [NO_HASHES] * len(runs)
        parts = [tokens[: count * size] for (_, tokens), count in zip(runs, counts, strict=True)]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        mixed = mix(joined.astype(np.uint64).reshape(-1, size) @ self._weights + _G)
        found: list[Hashes] = []
        at = 0
        for (state, _), count in zip(runs, counts, strict=True):
            found.append(_chained(state, mixed[at : at + count]) if count else NO_HASHES)
            at += count
        return found


def _chained(state: int, mixed: Hashes) -> Hashes:
    if len(mixed) <= _SHORT:
        found = []
        for each in mixed.tolist():
            state = (state + each) * _M & _MASK
            found.append(state)
        return np.array(found, dtype=np.uint64)
    parts = []
    for start in range(0, len(mixed), _RUN):
        part = mixed[start : start + _RUN]
        part = (part * _DOWN[: len(part)]).cumsum()
        part += np.uint64(state)
        part *= _UP[: len(part)]
        state = int(part[-1])
        parts.append(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
