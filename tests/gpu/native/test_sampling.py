"""The best token, or one drawn."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.native.kernels import Kernels
from ramify.gpu.native.threads import aligned


def choose(
    kernels: Kernels, run: Callable[..., None], logits: Tensor, heat: float, uniforms: list[float]
) -> list[int]:
    rows = len(logits)
    count, tokens = aligned(1), np.zeros(rows, dtype=np.int64)
    count[0] = rows
    heats = np.full(rows, heat, dtype=np.float32)
    run(kernels.choose(count, logits, heats, np.array(uniforms), tokens))
    found: list[int] = tokens.tolist()
    return found


def test_the_best_token_is_the_first_of_equals(kernels: Kernels, run: Callable[..., None]) -> None:
    logits = torch.randn(3, 64)
    logits[1, [40, 9, 25]] = 7.0
    logits[2] = -torch.inf
    logits[2, 33] = -5.0
    assert choose(kernels, run, logits, 0.0, [0.0] * 3) == [int(logits[0].argmax()), 9, 33]


def test_logits_that_are_not_finite_give_no_token(kernels: Kernels, run: Callable[..., None]) -> None:
    logits = torch.randn(4, 32)
    logits[0, 5], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    for heat in (0.0, 0.7):
        found = choose(kernels, run, logits, heat, [0.3] * 4)
        assert found[:3] == [-1, -1, -1]
        assert found[3] >= 0


def test_draws_invert_the_cumulative_distribution(kernels: Kernels, run: Callable[..., None]) -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 80) * 3
    logits[0, ::7] = -torch.inf
    masses = (logits[0].double() / 0.8).softmax(0).cumsum(0)
    for uniform in np.linspace(0.001, 0.999, 97):
        wanted = int(torch.searchsorted(masses, float(uniform), right=True))
        assert choose(kernels, run, logits, 0.8, [float(uniform)]) == [wanted]


def test_a_tiny_temperature_draws_the_best(kernels: Kernels, run: Callable[..., None]) -> None:
    logits = torch.randn(2, 48) * 10
    assert choose(kernels, run, logits, 1e-6, [0.0, 0.999]) == logits.argmax(1).tolist()
