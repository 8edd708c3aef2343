"""The sampler on torch: penalties, temperature, top-k, top-p, min-p, seeds.

One batch may mix all settings; each row's outcome is a function of its own logits, settings and
(seed, output index). Greedy rows cost one pass over the logits, and nothing is sorted unless a row
asks for top-k or top-p. It does not know models or the KV pool.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.constraints.rows import Masks
from ramify.gpu.sampling.penalties import Penalties
from ramify.gpu.sampling.settings import RowSettings
from ramify.gpu.sampling.truncation import thresholds
from ramify.gpu.step.rows import Ints
from ramify.protocol.plan import OpenRow
from ramify.protocol.sampling import TokenLogprobs


@dataclass(slots=True)
class Sampled:
    """The outcome: `tokens` int64[S], `finite` bool[S] (False: logits are NaN or infinite), both on the
    device.
    """

    tokens: Tensor
    finite: Tensor
    logprobs: "list[TokenLogprobs | None]"


class Sampler:
    """Sampler on torch, with the rows' settings and the tokens that penalised rows have seen."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._penalties = Penalties(vocab_size, device)
        self.settings = RowSettings(max_rows, vocab_size)

    def open(self, opened: OpenRow) -> None:
        """Take over a row's settings and, if it is penalised, its history."""
        self.settings.open(opened.row, opened.sampling)
        self._penalties.open(opened.row, opened.sampling, opened.history, opened.sampled)

    def close(self, row: int) -> None:
        """Forget the row's history."""
        self._penalties.close(row)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Ints,
        draws: Ints,
        drafts: Ints | None = None,
        masks: Masks | None = None,
    ) -> Sampled:
        """Sample from logits float32[S, V] of `rows` int64[S]; `draws`: indices of the output tokens.

        `drafts` [S], for a step in which a row may have several lines, one after another: the draft that
        a line runs, NO_TOKEN on the first. Penalties count the drafts before a line. `masks`: of lines
        that may sample some tokens only; log-probabilities are the model's all the same. With either,
        call `record` when it is known how much of what was sampled is output.
        """
        raw = logits
        if self._penalties:
            logits = self._penalised(logits, rows, drafts)
        if masks is not None:
            logits = self._masked(logits, masks)
        best, tokens = logits.max(-1)
        finite = best.isfinite()  # NaN wins every max
        if masks is not None:  # of illegal tokens, too
            finite &= raw.max(-1).values.isfinite()
        drawn = np.flatnonzero(self.settings.temperatures[rows] > 0)
        if len(drawn):
            tokens = self._draw(logits, best, tokens, rows, draws, drawn)
        tokens = torch.where(finite, tokens, 0)
        if drafts is None and masks is None:
            self.record(rows, tokens)
        return Sampled(tokens, finite, self._token_logprobs(raw, tokens, rows))

    def record(self, rows: Ints, tokens: Tensor) -> None:
        """Count tokens int64[S] as outputs of `rows` [S], in which a row may stand several times."""
        if self._penalties:
            for line, row in enumerate(rows.tolist()):
                if row in self._penalties:
                    self._penalties.record(row, tokens[line])

    def _masked(self, logits: Tensor, masks: Masks) -> Tensor:
        if len(masks.lines):
            lines = self._tensor(masks.lines)
            legal = self._tensor(masks.flags(logits.shape[1]))
            logits = logits.index_copy(0, lines, logits[lines].masked_fill(~legal, -torch.inf))
        if len(masks.forced):
            lines, tokens = self._tensor(masks.forced), self._tensor(masks.tokens)[:, None]
            only = logits[lines].gather(1, tokens)
            forced = logits.new_full((len(lines), logits.shape[1]), -torch.inf).scatter(1, tokens, only)
            logits = logits.index_copy(0, lines, forced)
        return logits

    def _penalised(self, logits: Tensor, rows: Ints, drafts: Ints | None) -> Tensor:
        lines = [line for line, row in enumerate(rows.tolist()) if row in self._penalties]
        if not lines:
            return logits
        logits = logits.clone()
        first = 0  # line of the row
        for line in lines:
            ahead = None
            if drafts is not None:
                first = line if drafts[line] < 0 else first
                ahead = self._tensor(drafts[first + 1 : line + 1])
            logits[line] = self._penalties.apply(int(rows[line]), logits[line], ahead)
        return logits

    def _draw(
        self, logits: Tensor, best: Tensor, tokens: Tensor, rows: Ints, draws: Ints, drawn: Ints
    ) -> Tensor:
        """Replace the tokens of the lines `drawn` by random ones, by inversion of the CDF."""
        if len(drawn) < len(rows):
            lines = torch.from_numpy(drawn).to(self._device)
            logits, best = logits[lines], best[lines]
            rows, draws = rows[drawn], draws[drawn]
        settings, draw = self.settings, self.settings.draws(rows, draws)
        # relative to the best logit, so that a tiny temperature cannot overflow
        scaled = (logits - best[:, None]) / self._tensor(draw.temperatures)[:, None]
        top_k, top_p, min_p = settings.top_k[rows], settings.top_p[rows], settings.min_p[rows]
        if (top_k > 0).any() or (top_p < 1).any() or (min_p > 0).any():
            low = thresholds(scaled, self._tensor(top_k), self._tensor(top_p), self._tensor(min_p))
            scaled = scaled.masked_fill(scaled < low[:, None], -torch.inf)
        masses = scaled.exp_().cumsum(-1, dtype=torch.float64)
        points = self._tensor(draw.uniforms)[:, None] * masses[:, -1:]
        chosen = torch.searchsorted(masses, points, right=True)[:, 0]
        index = torch.from_numpy(drawn).to(self._device)
        # past the end: NaN, which is refused later, or a product rounded up to the whole mass
        chosen = torch.where(chosen < logits.shape[1], chosen, tokens[index])
        return tokens.index_copy(0, index, chosen)

    def _token_logprobs(self, raw: Tensor, tokens: Tensor, rows: Ints) -> "list[TokenLogprobs | None]":
        """Compute the log-probabilities that rows ask for; empty: no row does."""
        wanted = self.settings.logprobs[rows]
        if not wanted.any():
            return []
        asked = np.flatnonzero(wanted)
        lines = torch.from_numpy(asked).to(self._device)
        values = raw[lines].log_softmax(-1)
        own = values.gather(1, tokens[lines][:, None])[:, 0].tolist()
        most = min(int(wanted.max()), raw.shape[1])
        top = values.topk(most)
        top_values, top_ids = top.values.tolist(), top.indices.tolist()
        result: list[TokenLogprobs | None] = [None] * len(rows)
        for i, line in enumerate(asked.tolist()):
            k = int(wanted[line])
            result[line] = TokenLogprobs(own[i], top_ids[i][:k], top_values[i][:k])
        return result

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
