"""Weights in groups of 32: rounding to 4 bits, and blocks of several types joined to one weight."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from ramify.gpu.ops.linear.grouped import GROUP, GroupedWeight, four_bits, grouped, joined
from tests.gguf_files import blocks


def of(kind: str, rows: int = 6) -> GroupedWeight:
    values = np.random.default_rng(rows).normal(size=(rows, 512)).astype(np.float32)
    return grouped(kind, torch.from_numpy(blocks(values, kind)[0]))


def test_what_4_bits_stand_for_is_found_again() -> None:
    first = of("Q4_0")
    again = four_bits(first.floats())
    assert torch.equal(again.floats(), first.floats())


def test_rounding_is_no_worse_than_that_of_the_package() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    raw = quants.quantize(weight.numpy(), GGMLQuantizationType.Q4_0)
    theirs = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType.Q4_0))
    ours = four_bits(weight)
    assert ours.codes.min() >= -8
    assert ours.codes.max() <= 7
    assert (ours.floats() - weight).norm() <= (theirs - weight).norm()


def test_inputs_that_are_no_whole_group_are_padded() -> None:
    weight = torch.randn(3, 48)
    found = four_bits(weight)
    assert found.scales.shape == (3, 2)
    assert not found.floats()[:, 48:].any()
    assert not four_bits(torch.zeros(2, GROUP)).floats().any()


def test_joined_blocks_are_what_each_was() -> None:
    parts = [of("Q4_0", 3), of("Q4_1", 4), of("Q4_K", 5)]
    whole = joined(parts)
    assert whole.bits == 4
    assert whole.codes.min() >= 0  # with offsets
    torch.testing.assert_close(whole.floats(), torch.cat([part.floats() for part in parts]))
    wider = joined([*parts, of("Q8_0", 2), of("Q5_0", 1), of("Q5_K", 1)])
    assert wider.bits == 8
    assert torch.equal(wider.floats()[12:14], of("Q8_0", 2).floats())


def test_groups_of_16_are_rounded_to_8_bits_in_32() -> None:
    part = of("Q6_K")
    whole = joined([part])
    assert whole.bits == 8
    assert whole.scales.shape == (6, 16)
    assert (whole.floats() - part.floats()).norm() < 0.005 * part.floats().norm()


def test_some_inputs_of_it() -> None:
    """In groups as large as both ends let them be, of 32 at least."""
    weight = GroupedWeight(torch.randint(0, 16, (5, 256)), torch.rand(5, 2), torch.rand(5, 2), 4)
    for first, last, group in ((0, 128, 128), (96, 256, 32)):
        part = weight.columns(first, last)
        assert part.group == group
        torch.testing.assert_close(part.floats(), weight.floats()[:, first:last])
    with pytest.raises(ValueError, match="cannot be divided from 0 to 100"):
        weight.columns(0, 100)
