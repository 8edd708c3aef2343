"""Frequency, presence and repetition penalties, and the tokens that the penalised rows have seen.

State exists only for rows that ask for a penalty. The tokens are on the device, so a step may be
launched before the host knows what the one before it sampled.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramify.protocol.sampling import SamplingParams


@dataclass(slots=True)
class _History:
    sampling: SamplingParams
    counts: Tensor  # float32[V] occurrences among the outputs
    seen: Tensor  # bool[V] occurs anywhere in the branch or the outputs


class Penalties:
    """The histories of the rows that are penalised."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._histories: dict[int, _History] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._histories

    def __bool__(self) -> bool:
        return bool(self._histories)

    def open(self, row: int, sampling: SamplingParams, history: bytes, sampled: int) -> None:
        """Begin a row. `history`: int32, every earlier token; the last `sampled` of them are outputs."""
        self.close(row)
        if not sampling.penalized:
            return
        tokens = torch.from_numpy(np.frombuffer(history, dtype=np.int32).astype(np.int64))
        tokens = tokens.to(self._device)
        counts = torch.zeros(self._vocab_size, device=self._device)
        outputs = tokens[len(tokens) - sampled :]
        counts.index_add_(0, outputs, torch.ones(len(outputs), device=self._device))
        seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        seen[tokens] = True
        self._histories[row] = _History(sampling, counts, seen)

    def close(self, row: int) -> None:
        self._histories.pop(row, None)

    def apply(self, row: int, logits: Tensor, drafts: Tensor | None = None) -> Tensor:
        """Return a penalised copy of a row's logits [V]. `drafts` int64[n] count as outputs."""
        history = self._histories[row]
        sampling, counts, seen = history.sampling, history.counts, history.seen
        if drafts is not None:
            counts = counts.index_add(0, drafts, torch.ones(len(drafts), device=self._device))
            seen = seen.index_fill(0, drafts, True)
        rate = sampling.repetition_penalty
        if rate != 1.0:
            moved = torch.where(logits > 0, logits / rate, logits * rate)
            logits = torch.where(seen, moved, logits)
        logits = logits - sampling.frequency_penalty * counts
        return logits - sampling.presence_penalty * (counts > 0)

    def record(self, row: int, token: Tensor) -> None:
        """Count a sampled token, int64 scalar on the device."""
        history = self._histories[row]
        history.counts[token] += 1
        history.seen[token] = True
