"""The tokens that penalised rows have seen, as a table on the device.

Only rows that ask for a penalty have a line in the table. The sampling kernels count the tokens that
they sample, so a step may be launched before the host knows the tokens of the step before. This file
does not know what a penalty is.
"""

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.step.staging import Upload

_FIRST = 4  # lines to begin with


class TokenCounts:
    """Token counts of penalised rows.

    `table` int32[lines, vocabulary]: twice the occurrences among a row's outputs, plus 1 if the token
    occurs anywhere in the branch or the outputs.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.table: Tensor = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._free = [0]
        self._upload = Upload(device)
        self._vocab_size = vocab_size

    def take(self, entry: int, histories: list[tuple[bytes, int]]) -> list[int]:
        """Take a line of the table for each history, through ring entry `entry` of the upload.

        A history is (int32 of every earlier token, how many of the last ones are outputs).
        """
        taken = [self._line() for _ in histories]
        places, counts = [], []
        for line, (history, sampled) in zip(taken, histories, strict=True):
            tokens = np.frombuffer(history, dtype=np.int32)
            codes = 2 * np.bincount(tokens[len(tokens) - sampled :], minlength=self._vocab_size)
            codes[tokens] |= 1
            ids = np.flatnonzero(codes)
            places.append(line * self._vocab_size + ids)
            counts.append(codes[ids].astype(np.int32))
            self.table[line].zero_()
        sent = self._upload.send(entry, places=np.concatenate(places), counts=np.concatenate(counts))
        self.table.view(-1).index_copy_(0, sent["places"], sent["counts"])
        return taken

    def give_back(self, line: int) -> None:
        """Free the line of a closed row."""
        self._free.append(line)

    def _line(self) -> int:
        if not self._free:
            old = len(self.table)
            wider = self.table.new_zeros((max(_FIRST, 2 * old), self._vocab_size))
            wider[:old] = self.table
            self._free = list(range(len(wider) - 1, old - 1, -1))
            self.table = wider
        return self._free.pop()
