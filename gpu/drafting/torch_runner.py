"""The draft model on torch: a forward pass for each token of the longest guess."""

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.torch_ops import TorchOps, torch_inputs
from ramify.gpu.step.step_rows import Ints, StepRows

_NO_TOKENS = np.empty(0, dtype=np.int32)


class TorchRunner:
    """Draft model on torch over `pool`. `attention`: its own, of its own shape."""

    def __init__(self, model: Decoder, pool: KVPool, attention: AttentionBackend, max_rows: int) -> None:
        self._model, self._attention = model, attention
        last = torch.zeros(max_rows, dtype=torch.int64, device=model.device)  # never read: all is given
        self._ops = TorchOps(pool, last, attention)

    @torch.inference_mode()
    def run(self, step: StepRows, most: Ints) -> Ints:
        found = np.zeros((len(most), int(most.max(initial=1))), dtype=np.int64)
        found[:, 0] = self._sample(step).numpy()
        rows = step.rows[step.sampling]
        ends = (step.starts + step.counts)[step.sampling]
        for j in range(1, found.shape[1]):
            count = int((most > j).sum())
            index = np.arange(count)
            given = found[:count, j - 1].astype(np.int32)
            ones = np.ones(count, dtype=np.int64)
            decodes = StepRows(
                rows[:count], ends[:count] + j - 1, ones, 0, _NO_TOKENS, index, index, given
            )
            found[:count, j] = self._sample(decodes).numpy()
        return found

    def _sample(self, step: StepRows) -> Tensor:
        """Run the model. Returns the likeliest token of each line that samples, int64[S] on the host."""
        inputs = torch_inputs(step, self._attention, self._model.device)
        hidden = self._model.forward(inputs, self._ops)
        if not len(step.sampling):
            return torch.empty(0, dtype=torch.int64)
        return self._model.logits(hidden, inputs.sampled_lines, self._ops).float().argmax(-1).cpu()
