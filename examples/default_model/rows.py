"""Token files packed into rows of equal length, ready for the device.

Long texts are cut where a row ends; conversations stay whole, and the rest of a row is padding. Knows
the files `prepare.py` writes. Does not know models or losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PADDING = 65535


@dataclass
class Rows:
    """Packed rows; each is one token longer than the model's input, for the shifted target.

    tokens: int32 [R, T + 1]; own: uint8 [R, T + 1], 1 in a text or an assistant's turn; documents: int32
    [R, T + 1], numbers that tell documents of a row apart, PADDING where there is none.
    """

    tokens: Tensor
    own: Tensor
    documents: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: str) -> Rows:
        """The same rows on a device."""
        return Rows(self.tokens.to(device), self.own.to(device), self.documents.to(device))

    def take(self, order: Tensor) -> Rows:
        """Some of the rows."""
        return Rows(self.tokens[order], self.own[order], self.documents[order])


def join(parts: list[Rows]) -> Rows:
    """All rows of several sets."""
    return Rows(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.own for part in parts]),
        torch.cat([part.documents for part in parts]),
    )


def _places(lengths: np.ndarray, row: int) -> tuple[np.ndarray, int]:
    """First-come packing of whole documents: position of each one's start in the rows laid end to end."""
    found = np.empty(len(lengths), dtype=np.int64)
    rows, used = 0, 0
    for place, length in enumerate(lengths.tolist()):
        if used + length > row:
            rows, used = rows + 1, 0
        found[place] = rows * row + used
        used += length
    return found, rows + 1


def load(
    folder: Path, name: str, epochs: float, length: int, seed: int, *, shuffle: bool = True
) -> Rows:
    """Rows of one set of token files, `epochs` times over in different orders."""
    tokens = np.load(folder / f"{name}.tokens.npy")
    own = np.load(folder / f"{name}.mask.npy")
    starts = np.load(folder / f"{name}.starts.npy")
    rng = np.random.default_rng([seed, *name.encode()])
    count = len(starts) - 1
    order: list[np.ndarray] = []
    left = epochs
    while left > 0:
        once = rng.permutation(count) if shuffle else np.arange(count)
        order.append(once[: max(1, round(count * min(1.0, left)))])
        left -= 1
    chosen = np.concatenate(order)
    row = length + 1
    whole = "text" not in name
    lengths = np.diff(starts)[chosen]
    if whole:
        lengths = np.minimum(lengths, row)
        places, rows = _places(lengths, row)
    else:
        places = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        rows = -(-int(lengths.sum()) // row)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    source = np.repeat(starts[chosen], lengths) + within
    target = np.repeat(places, lengths) + within
    out_tokens = np.zeros(rows * row, dtype=np.int32)
    out_own = np.zeros(rows * row, dtype=np.uint8)
    out_documents = np.full(rows * row, PADDING, dtype=np.int32)
    out_tokens[target] = tokens[source]
    out_own[target] = own[source]
    out_documents[target] = np.repeat(np.arange(len(chosen)) % PADDING, lengths)
    return Rows(
        torch.from_numpy(out_tokens.reshape(rows, row)),
        torch.from_numpy(out_own.reshape(rows, row)),
        torch.from_numpy(out_documents.reshape(rows, row)),
    )


def byte_lengths(tokenizer: Path) -> Tensor:
    """Bytes of text each token stands for; special tokens stand for none. [V]"""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    table = torch.zeros(loaded.get_vocab_size())
    for token, number in loaded.get_vocab().items():
        # A byte-level token is written with one character for each byte.
        table[number] = 0 if token.startswith("<|") and token.endswith("|>") else len(token)
    return table
