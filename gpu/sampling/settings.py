"""The sampling settings of rows, declared once for every sampler.

A row's settings are kept in arrays, so that a step's share of them is one indexing. The tokens that a
row has seen are not settings; see `penalties` and `token_counts`.
"""

import math

import numpy as np
import numpy.typing as npt

from ramify.gpu.sampling.randomness import uniforms
from ramify.gpu.step.inputs import Draws
from ramify.gpu.step.rows import Ints
from ramify.protocol.sampling import SamplingParams


class RowSettings:
    """Arrays of settings, an entry for each row. The entries of closed rows are left as they are."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.seeds: Ints = np.zeros(max_rows, dtype=np.int64)
        self.temperatures: npt.NDArray[np.float32] = np.zeros(max_rows, dtype=np.float32)  # 0: greedy
        self.top_k: Ints = np.zeros(max_rows, dtype=np.int64)  # 0: off
        self.top_p: npt.NDArray[np.float64] = np.ones(max_rows)  # 1: off
        self.min_p: npt.NDArray[np.float64] = np.zeros(max_rows)  # 0: off
        self.floors = np.full(max_rows, -np.inf, dtype=np.float32)  # log of min_p
        self.logprobs: Ints = np.zeros(max_rows, dtype=np.int64)  # of the best tokens; 0: none at all
        self.special = np.zeros(max_rows, dtype=np.bool_)  # asks for more than a draw

    def open(self, row: int, sampling: SamplingParams) -> None:
        """Take over a row's settings."""
        self.seeds[row] = sampling.seed
        self.temperatures[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, self._vocab_size)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.logprobs[row] = min(sampling.logprobs, self._vocab_size)
        self.floors[row] = math.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
        self.special[row] = sampling.penalized or sampling.logprobs > 0

    def draws(self, rows: Ints, indices: Ints) -> Draws:
        """Compute temperature and random number of output token `indices` [S] of `rows` [S]."""
        return Draws(self.temperatures[rows], uniforms(self.seeds[rows], indices))
