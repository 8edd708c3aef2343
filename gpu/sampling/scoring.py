"""Log-probabilities of given tokens (of the input, or of possible continuations), and, where asked, of
the most likely tokens at the same positions.

The logits of a long prompt would take gigabytes, so they are computed for a few positions at a time and
only the targets' are kept. This file does not know models: it is given a function from positions to
logits. Nothing here waits for the device.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.step.rows import Scored

LOGITS_BYTES = 32 << 20  # of one slice's logits, as float32


def slice_lines(vocab_size: int) -> int:
    """Compute how many positions' logits are made at a time."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def arrays(scored: Scored) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]]:
    """Collect the arrays that `score` reads on the device."""
    lines = scored.lines.astype(np.int32)  # the type of a step's sampled lines: one kernel reads both
    found: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]]
    found = {"lines": lines, "which": scored.which, "targets": scored.targets.astype(np.int64)}
    if scored.most:
        width = 1 + 2 * scored.most
        found["kept"] = np.flatnonzero(np.arange(width) < 1 + 2 * scored.tops[:, None])
    return found


@torch.inference_mode()
def score(
    scored: Scored,
    views: Mapping[str, Tensor],
    logits_of: Callable[[Tensor], Tensor],
    slice_size: int,
) -> Tensor:
    """Compute the targets' raw log-probabilities, float32[K]; NaN where they are not finite.

    Where likely tokens are asked for, the result has these too, as `StepResult.scores`.

    `views`: `arrays(scored)` on the device. `logits_of(lines)`: int32[L] of the step's lines, L at
    most `slice_size`, -> logits [L, vocabulary], which the next call may overwrite.
    """
    lines, which, targets = views["lines"], views["which"], views["targets"]
    most = scored.most
    found = torch.empty((len(targets), 1 + 2 * most), dtype=torch.float32, device=targets.device)
    firsts = np.arange(0, len(lines), slice_size)
    ends = np.searchsorted(scored.which, firsts + slice_size)
    begin = 0
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        logits = logits_of(lines[first : first + slice_size]).float()
        place = which[begin:end] - first
        norms = logits.logsumexp(-1)
        found[begin:end, 0] = logits[place, targets[begin:end]] - norms[place]
        if most:
            values, tokens = logits.topk(most)
            found[begin:end, 1::2] = tokens[place].float()
            found[begin:end, 2::2] = (values - norms[:, None])[place]
        begin = end
    found = torch.where(found.isfinite(), found, torch.nan).flatten()
    return found[views["kept"]] if most else found
