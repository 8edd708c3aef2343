"""Latent attention on torch: absorbed for decodes and short extends, expanded for long ones.

An extend's prefix is expanded a stretch at a time, so that memory stays bounded, and the stretches are
merged by their log-sum-exp. Pages, and attention over latents, are those of `torch_attention`.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.attention.torch_attention import (
    Extend,
    TorchAttention,
    attention_with_sums,
    flash,
    merge_parts,
)
from ramify.gpu.kv.layout import LayerKV

_STRETCH = 4096  # keys that are expanded at once


class TorchLatent(TorchAttention):
    """`TorchAttention`, whose `attend` takes absorbed queries, for queries still to be absorbed."""

    def attend_latent(self, q: Tensor, kv: LayerKV, heads: LatentHeads) -> Tensor:
        """Attend for the planned step: q [T, heads, nope + turned] -> [T, heads * value]."""
        outputs = [
            self._expanded(extend, q, kv, heads)
            if heads.pays_to_expand(extend.last - extend.first, extend.count, q.shape[2] - heads.nope)
            else self._absorbed(extend, q, kv, heads)
            for extend in self._extends[None, False]
        ]
        if None in self._decodes:
            lines = heads.absorb(q[self._first_decode :])
            mixed = self._decode(self._decodes[None], kv, lines, heads.spec)
            outputs.append(heads.open(mixed.view(lines.shape)))
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return output.flatten(1)

    def _absorbed(self, extend: Extend, q: Tensor, kv: LayerKV, heads: LatentHeads) -> Tensor:
        lines = heads.absorb(q[extend.first : extend.last])
        mixed = self._extend(replace(extend, first=0, last=len(lines)), kv, lines, heads.spec)
        return heads.open(mixed.view(lines.shape))

    def _expanded(self, extend: Extend, q: Tensor, kv: LayerKV, heads: LatentHeads) -> Tensor:
        """Attend for the queries over their prefix, stretch by stretch, and over themselves."""
        queries = q[extend.first : extend.last].transpose(0, 1)  # [heads, n, D]
        n, count = queries.shape[1], extend.count
        begins = [*range(0, count - n, _STRETCH), count - n]
        parts = []
        for begin, end in zip(begins, [*begins[1:], count], strict=True):
            slots = extend.keys
            if isinstance(slots, slice):
                slots = slice(slots.start + begin, slots.start + end)
            else:
                slots = slots[begin:end]
            latents, _ = kv.read(slots, q.dtype)
            k, v = heads.expand(latents[:, 0])
            parts.append(self._over(queries, k, v, begin == count - n, heads))
        outputs, sums = (torch.cat([part[at] for part in parts], 1) for at in (0, 1))
        owners = torch.arange(n, device=q.device).repeat(len(parts))
        return merge_parts(outputs.transpose(0, 1), sums.transpose(0, 1), owners, n, heads.spec)

    def _over(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, heads: LatentHeads
    ) -> tuple[Tensor, Tensor]:
        """Attend to k, v of one stretch: outputs [heads, n, value] and log-sum-exps [heads, n]."""
        q, k, v = q[None], k[None], v[None]
        if self._in_place:  # torch's kernel, which wants keys and values of one size
            size = max(k.shape[3], v.shape[3])
            padded = (F.pad(x, (0, size - x.shape[3])) for x in (q, k, v))
            output, sums = flash(*padded, is_causal=causal, scale=heads.spec.scale)
        else:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            output, sums = attention_with_sums(q, k, v, mask.tril_() if causal else None, heads.spec)
        return output[0, :, :, : heads.value], sums[0]
