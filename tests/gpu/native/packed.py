"""Weights of 8 bits packed in torch: what `gpu.native.packer` must make, to the last bit."""

import torch
from torch import Tensor

from ramify.gpu.native.host import Isa
from ramify.gpu.native.linear import PANEL, PackedWeight, padded_inputs, panel_bias, panel_order


def pack_weight(
    weight: Tensor, bias: Tensor | None, isa: Isa, gated: bool = False, padding: float = 0.0
) -> PackedWeight:
    """weight [outputs, inputs]. `gated`: a gate's rows, then as many of `up`, are mixed by half panels.

    `padding`: what outputs that pad the last panel are.
    """
    outputs, inputs = weight.shape
    weight = weight.float()
    order = panel_order(outputs, gated)
    padded = torch.zeros((len(order), padded_inputs(inputs)))
    known = order >= 0
    padded[known, :inputs] = weight[order[known]]
    scales = padded.abs().amax(1) / 127
    small = torch.where(scales > 0, scales, 1.0)
    quantised = (padded / small[:, None]).round_().to(torch.int8)
    sums = quantised.sum(1, dtype=torch.int32) * -isa.offset
    panels = quantised.view(-1, PANEL, padded.shape[1] // 4, 4).transpose(1, 2).contiguous()
    bias = panel_bias(bias, order, padding)
    return PackedWeight(panels, scales, sums, bias, padded.shape[1], len(order))
