"""One step as flat tensors, in FlashInfer's vocabulary: indptr, positions, slots.

Turns what the rows say (numpy, host) into what the model reads (tensors, device). It does not
know how attention is computed: a back end makes its own index tensors of a Batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.step.rows import Ints, RowTable, StepRows


@dataclass(slots=True)
class Batch:
    """B sequences, T tokens, S sampled positions. The extends come first, then the decodes.

    Sequence i's queries are tokens [qo_indptr[i], qo_indptr[i + 1]); its keys are the positions
    [0, kv_lens[i]) of row rows[i], the new ones included.
    """

    rows: Ints  # [B]
    extends: int
    qo_indptr: Ints  # [B + 1]
    kv_lens: Ints  # [B]
    tokens: Tensor  # int64[T] on the device
    positions: Tensor  # int64[T]
    slots: Tensor  # int64[T] where each token's k and v go
    sample_positions: Tensor | None  # int64[S] indices into T; None: all, in order

    @property
    def decodes(self) -> int:
        return len(self.rows) - self.extends


def make_batch(step: StepRows, table: RowTable, last_tokens: Tensor) -> Batch:
    """`last_tokens`: int64[max_rows] on the device, what each row sampled last.

    A decode's input is read there, so the host need not know it.
    """
    device = last_tokens.device
    n = step.extends
    decode_rows = torch.from_numpy(step.rows[n:]).to(device)
    if n == 0:
        positions = step.starts
        slots = table.slots_at(step.rows, positions)
        return Batch(
            rows=step.rows,
            extends=0,
            qo_indptr=np.arange(len(step.rows) + 1),
            kv_lens=positions + 1,
            tokens=last_tokens[decode_rows],
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            sample_positions=None,
        )
    indptr = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(step.counts)])
    rows = np.repeat(step.rows, step.counts)
    positions = np.arange(indptr[-1]) + np.repeat(step.starts - indptr[:-1], step.counts)
    extend_tokens = torch.from_numpy(step.tokens.astype(np.int64)).to(device)
    return Batch(
        rows=step.rows,
        extends=n,
        qo_indptr=indptr,
        kv_lens=step.starts + step.counts,
        tokens=torch.cat((extend_tokens, last_tokens[decode_rows])),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(table.slots_at(rows, positions)).to(device),
        sample_positions=torch.from_numpy(indptr[1:][step.sampling] - 1).to(device),
    )
