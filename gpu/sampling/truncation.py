"""top-k, top-p and min-p as one number per row: the lowest logit that is kept.

A threshold instead of a list of ids: equal logits are kept or dropped together, so the outcome
depends neither on how a sort breaks ties nor on the neighbours' settings. The vocabulary is
sorted only for rows whose top-p needs more than the first few hundred candidates.
"""

import torch
from torch import Tensor

_CANDIDATES = 512  # tokens looked at first for top-p without top-k


def thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Compute the thresholds float[R] of logits [R, V] after temperature.

    top_k int64[R] (0: off), top_p, min_p float[R]. Tokens with a logit >= the threshold are kept; there
    is at least one.
    """
    vocabulary = logits.shape[1]
    limits = torch.where(top_k > 0, top_k.clamp(max=vocabulary), 0)
    lowest = logits.new_full((len(logits),), -torch.inf)
    needs_sort = (limits > 0) | (top_p < 1.0)
    if bool(needs_sort.any()):
        lines = needs_sort.nonzero()[:, 0]
        lowest[lines] = _sorted_thresholds(logits[lines], limits[lines], top_p[lines])
    best = logits.amax(-1)
    return torch.maximum(lowest, best + min_p.log().to(logits.dtype))


def _sorted_thresholds(logits: Tensor, limits: Tensor, top_p: Tensor) -> Tensor:
    vocabulary = logits.shape[1]
    width = min(vocabulary, max(int(limits.max()), _CANDIDATES))
    best = logits.topk(width).values  # [R, width] from high to low
    low = logits.new_full((len(logits),), -torch.inf)
    limited = limits > 0
    kth = best.gather(1, (limits - 1).clamp(min=0)[:, None])[:, 0]
    low = torch.where(limited, kth, low)
    # the mass of the tokens that top-k keeps, ties at the k-th place included; the best token's is 1
    top = best[:, :1]
    kept = torch.where(logits >= low[:, None], (logits - top).exp(), 0.0).sum(-1, dtype=torch.float64)
    nucleus, complete = _nucleus(best, top, kept, top_p)
    low = torch.maximum(low, nucleus)
    unfinished = (~complete & ~limited & (top_p < 1.0)).nonzero()[:, 0]
    if len(unfinished):
        ordered = logits[unfinished].sort(-1, descending=True).values
        rest = (values[unfinished] for values in (top, kept, top_p))
        low[unfinished], _ = _nucleus(ordered, *rest)
    return low


def _nucleus(ordered: Tensor, top: Tensor, kept: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Find the last logit of the smallest set with mass >= top_p * kept (Holtzman et al. 2020).

    ordered [R, W] from high to low, top [R, 1] the best, kept float64[R]. Also: whether W sufficed.
    """
    own = (ordered - top).exp().double()
    masses = own.cumsum(-1)
    wanted = top_p * kept
    count = (masses - own < wanted[:, None]).sum(-1).clamp(min=1)
    low = ordered.gather(1, (count - 1)[:, None])[:, 0]
    off = top_p >= 1.0
    return torch.where(off, -torch.inf, low), off | (masses[:, -1] >= wanted)
