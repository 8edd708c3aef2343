"""Guesses by the checkpoint's own multi-token prediction (MTP) layer (`models.mtp`), on torch.

The layer runs at the end of every step, for each position whose next token is known: so its keys and
values lie in the pages of their tokens, and forks, rollbacks and shared prefixes have them. A guess goes
on from the one before, with the layer's own stream in place of the model's. At the seam of a fork a key
was computed with another next token or not at all, which may make a guess worse, and never an output.

Each of several ranks has a part of the layer: rank 0 tells the others what runs.

This file knows rows and steps, and no weights.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.drafting.base import Guesses
from ramify.gpu.models.mtp import MtpLayer
from ramify.gpu.ops.torch_ops import TorchOps, torch_inputs
from ramify.gpu.step.step_rows import Ints, StepRows, Tokens
from ramify.protocol.plan import OpenRow

_NONE = np.empty(0, dtype=np.int64)
_Pairs = list[tuple[int, int, Tensor, list[int]]]  # row, first position, streams, next tokens


class MtpDrafter:
    """Drafter with `passes`. `tell`: called before each pass with what runs; see `MtpPasses.follow`."""

    def __init__(
        self, passes: "MtpPasses", context: int,
        tell: Callable[[StepRows | None, int], None] = lambda step, lines: None,
    ) -> None:  # fmt: skip
        self._passes, self._context, self._tell = passes, context, tell
        self._step: StepRows | None = None
        self._hidden: Tensor = torch.empty(0)  # of the step under way
        self._left: tuple[Ints, Ints, Tokens] | None = None  # its sampled tokens
        self._held: dict[int, tuple[int, Tensor]] = {}  # last positions whose next tokens are not known
        self._ready: dict[int, tuple[int, Tensor]] = {}  # position and stream from which guesses begin

    def open(self, opened: OpenRow) -> None:
        pass

    def close(self, row: int) -> None:
        self._held.pop(row, None)
        self._ready.pop(row, None)

    def propose(self, rows: Ints, most: Ints) -> Guesses:
        found: list[list[int]] = [[] for _ in rows]
        going = []
        for at, (row, count) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            begin = self._ready.get(row)
            if begin is not None and count > 0:
                going.append((at, row, min(count, self._context - begin[0]), *begin))
        depth = 0
        while going := [one for one in going if one[2] > depth]:
            self._tell(None, len(going))
            logits = self._passes.logits(torch.stack([one[4] for one in going]))
            tokens = logits.argmax(-1).tolist()
            for one, token in zip(going, tokens, strict=True):
                found[one[0]].append(token)
            depth += 1
            if all(one[2] <= depth for one in going):
                break
            pairs = [
                (row, start, stream[None], [token])
                for (_, row, _, start, stream), token in zip(going, tokens, strict=True)
            ]
            streams = self._run(pairs)
            going = [
                (at, row, count, start + 1, stream)
                for (at, row, count, start, _), stream in zip(going, streams, strict=True)
            ]
        flat = np.array([token for guess in found for token in guess], dtype=np.int32)
        return Guesses(np.array([len(guess) for guess in found], dtype=np.int64), flat)

    def continued(self, row: int, behind: Sequence[int], most: int) -> list[int]:
        return []

    def runs(self, step: StepRows) -> None:
        self._step = step

    def saw(self, hidden: Tensor) -> None:
        """Take over the model's streams after its last norm, of all lines of the step."""
        self._hidden = hidden

    def observe(self, rows: Ints, counts: Ints, tokens: Tokens) -> None:
        self._left = rows, counts, tokens

    def end(self) -> None:
        """Run the layer on the step, which is over."""
        self._run_prompts()
        if self._left is not None:
            self._run_samples(*self._left)
            self._left = None

    def _run_prompts(self) -> None:
        step, pairs, first, hidden = self._step, _Pairs(), 0, self._hidden
        assert step is not None
        for i in range(step.extends):
            row, start, count = int(step.rows[i]), int(step.starts[i]), int(step.counts[i])
            tokens = step.tokens[first : first + count].tolist()
            streams = hidden[first : first + count]
            held = self._held.get(row)
            if held is not None and held[0] == start - 1:
                pairs.append((row, start - 1, torch.cat((held[1][None], streams[:-1])), tokens))
            elif count > 1:
                pairs.append((row, start, streams[:-1], tokens[1:]))
            self._held[row] = start + count - 1, streams[-1].clone()
            self._ready.pop(row, None)
            first += count
        self._run(pairs)

    def _run_samples(self, rows: Ints, counts: Ints, tokens: Tokens) -> None:
        step, pairs = self._step, _Pairs()
        assert step is not None
        decodes = step.rows[step.extends :]
        begins = {row: at for at, row in reversed(list(enumerate(decodes.tolist())))}
        ends = np.cumsum(counts)
        for row, count, end in zip(rows.tolist(), counts.tolist(), ends.tolist(), strict=True):
            sampled = np.maximum(tokens[end - count : end], 0).tolist()
            at = begins.get(row)
            if at is None:  # behind an extend
                position, stream = self._held.pop(row)
                pairs.append((row, position, stream[None], sampled))
            else:
                line = len(step.tokens) + at
                start = int(step.starts[step.extends + at])
                pairs.append((row, start, self._hidden[line : line + count], sampled))
        last = 0
        streams = self._run(pairs)
        finite = streams.isfinite().all(-1).tolist()  # the key at some seams of forks was never written
        for row, start, _, sampled in pairs:
            last += len(sampled)
            self._ready.pop(row, None)
            if finite[last - 1]:
                self._ready[row] = start + len(sampled), streams[last - 1]

    def _run(self, pairs: _Pairs) -> Tensor:
        """Run the layer on all positions of `pairs`. Returns its streams there."""
        if not pairs:
            return self._hidden[:0]
        rows, starts, counts = (
            np.array(part, dtype=np.int64)
            for part in ([p[0] for p in pairs], [p[1] for p in pairs], [len(p[3]) for p in pairs])
        )
        tokens = np.concatenate([np.array(p[3], dtype=np.int32) for p in pairs])
        step = StepRows(rows, starts, counts, len(pairs), tokens, _NONE, _NONE)
        self._tell(step, 0)
        return self._passes.run(step, torch.cat([p[2] for p in pairs]))


class MtpPasses:
    """The passes of `layer` over the pool of `ops`. Each of several ranks makes the same calls.

    `attention`: the layer's own, over the page tables of the model's rows.
    """

    def __init__(self, layer: MtpLayer, ops: TorchOps, attention: AttentionBackend) -> None:
        self._layer, self._ops, self._attention = layer, ops, attention

    def run(self, step: StepRows, hidden: Tensor | None) -> Tensor:
        """Run the layer at the positions of `step`, whose tokens are the next ones. Returns its streams.

        `hidden` [T, hidden]: see `MtpLayer.forward`.
        """
        device = self._layer.decoder.device
        inputs = torch_inputs(step, self._attention, device)
        behind = torch.from_numpy(step.tokens).long().to(device)
        return self._layer.forward(inputs, self._ops, hidden, behind).normed

    def logits(self, streams: Tensor) -> Tensor:
        """Compute logits [S, vocabulary] of `streams` [S, hidden], which are those of rank 0."""
        stream = self._ops.stream(streams, None)
        return self._layer.logits(stream, self._ops)

    def follow(self, step: StepRows | None, lines: int) -> None:
        """Run what rank 0 runs: `run`, or, without a step, `logits` of so many lines."""
        decoder = self._layer.decoder
        if step is None:
            shape = lines, decoder.config.hidden_size
            self.logits(torch.empty(shape, dtype=decoder.dtype, device=decoder.device))
        else:
            self.run(step, None)
