"""A model without weights: which token follows which is a hash of all tokens before it.

The output of a request is a pure function of its tokens (`FakeModel.expected`), so that a test knows it.
This file knows no KV, pages or rows: `fake.py` runs plans on it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ramify.gpu.sampling.randomness import mix
from ramify.gpu.step.rows import Ints
from ramify.protocol.plan import NO_TOKEN
from ramify.protocol.sampling import SamplingParams

Hashes = npt.NDArray[np.uint64]

FACTOR = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64: prefix sums work


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A function from all tokens so far to the next one.

    `eos_every`: about one in so many tokens is `eos`; 0: none ever is. `first`: the lowest token
    that is ever sampled, so that a test can keep clear of special tokens.
    """

    vocab_size: int = 1000
    eos: int = 0
    eos_every: int = 0
    first: int = 1

    def advance(self, chain: Hashes, tokens: Hashes) -> Hashes:
        """Append one token to each chain."""
        return chain * np.uint64(FACTOR) + mix(tokens + np.uint64(1))

    def choose(self, chain: Hashes, salts: Hashes) -> npt.NDArray[np.int32]:
        """Choose the token that follows each chain. Salts are 0 for greedy requests. int32[N]."""
        mixed = mix(chain ^ salts)
        tokens = (mixed % np.uint64(self.vocab_size - self.first)).astype(np.int32) + np.int32(
            self.first
        )
        if self.first <= self.eos:
            tokens[tokens == self.eos] = self.first if self.eos != self.first else self.first + 1
        if self.eos_every:
            tokens[(mixed >> np.uint64(40)) % np.uint64(self.eos_every) == 0] = self.eos
        return tokens

    def choose_among(
        self, chain: Hashes, salts: Hashes, legal: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int32]:
        """Choose one of the `legal` [N, vocabulary] tokens for each chain; NO_TOKEN: there is none."""
        mixed = mix(chain ^ salts)
        counts = legal.sum(axis=1)
        nth = (mixed % np.maximum(counts, 1).astype(np.uint64)).astype(np.int64)
        tokens = (legal.cumsum(axis=1) > nth[:, None]).argmax(axis=1).astype(np.int32)
        return np.where(counts > 0, tokens, np.int32(NO_TOKEN))

    def scores(self, chain: Hashes, targets: Hashes) -> npt.NDArray[np.float32]:
        """Compute the log-probability of each target after its chain, -15 to 0. float32[K]."""
        mixed = mix(self.advance(chain, targets)) >> np.uint64(48)
        return -(mixed.astype(np.float32) / np.float32(4369.0))

    def likely(
        self, chain: Hashes, most: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Choose the `most` likely tokens after each chain, best first. Returns also their scores."""
        first: Hashes = mix(chain)[:, None] % np.uint64(self.vocab_size)
        tokens: Hashes = (first + np.arange(most).astype(np.uint64)) % np.uint64(self.vocab_size)
        scores = self.scores(chain.repeat(most), tokens.ravel()).reshape(tokens.shape)
        order = np.argsort(-scores, axis=1, kind="stable")
        return (
            np.take_along_axis(tokens, order, 1).astype(np.float32),
            np.take_along_axis(scores, order, 1),
        )

    def expected_scores(
        self, tokens: Sequence[int], places: Sequence[int], targets: Sequence[int]
    ) -> list[float]:
        """Compute the scores of `targets` after `places` of `tokens`, as `Submit` asks for them."""
        chains: list[np.uint64] = []
        chain: Hashes = np.zeros(1, dtype=np.uint64)
        for token in tokens:
            chain = self.advance(chain, np.array([token], dtype=np.uint64))
            chains.append(chain[0])
        behind = np.array([chains[place] for place in places], dtype=np.uint64)
        scores: list[float] = self.scores(behind, np.array(targets, dtype=np.uint64)).tolist()
        return scores

    def salts(self, seeds: Ints, draws: Ints, greedy: npt.NDArray[np.bool_]) -> Hashes:
        """Hash seed and output index of each sampled request; 0 for greedy ones."""
        salts = mix(mix(seeds.astype(np.uint64) + np.uint64(1)) + draws.astype(np.uint64)) | np.uint64(1)
        salts[greedy] = 0
        return salts

    def expected(
        self,
        tokens: Sequence[int],
        n: int,
        eos: Collection[int] | None = None,
        sampling: SamplingParams | None = None,
        sampled: int = 0,
    ) -> list[int]:
        """Compute the n tokens that follow `tokens`; fewer if one of `eos` comes (it is the last then).

        `sampling`: None: greedy. `sampled`: how many of `tokens` are outputs already.
        """
        greedy = sampling is None or sampling.greedy
        seed = np.array([0 if sampling is None else sampling.seed])
        chain = np.zeros(1, dtype=np.uint64)
        for token in tokens:
            chain = self.advance(chain, np.array([token], dtype=np.uint64))
        output: list[int] = []
        for draw in range(sampled, sampled + n):
            salt = self.salts(seed, np.array([draw]), np.array([greedy]))
            token = int(self.choose(chain, salt)[0])
            output.append(token)
            if eos is not None and token in eos:
                break
            chain = self.advance(chain, np.array([token], dtype=np.uint64))
        return output
