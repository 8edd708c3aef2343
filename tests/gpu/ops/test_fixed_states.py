"""Against the definitions, a token at a time, in float64."""

import pytest
import torch
from torch import Tensor

from ramify.gpu.ops.fixed_states import Sequences, convolve, delta_rule

COUNTS, DECODES = [5, 1, 130], 3
SOURCES, TARGETS = [0, 7, 2, 2, 3, 0], [1, 4, 5, 6, 8, 9]
SEQUENCES = Sequences(COUNTS, torch.tensor(SOURCES), torch.tensor(TARGETS))
STARTS = [0, 5, 6, 136, 137, 138]
TOKENS = 139


def close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours.double(), wanted, atol=2e-5, rtol=2e-5)


def slots(*shape: int) -> Tensor:
    state = torch.randn(10, *shape)
    state[0] = 0
    return state


@pytest.mark.parametrize(
    ("corrects", "channels"), [(True, 1), (False, 1), (True, 8)], ids=["delta net", "mamba", "KDA"]
)
def test_matrices_in_chunks_and_in_steps(corrects: bool, channels: int) -> None:
    torch.manual_seed(1)
    heads, keys, values = 3, 8, 12
    q, k = (torch.nn.functional.normalize(torch.randn(TOKENS, heads, keys), dim=-1) for _ in range(2))
    v, beta = torch.randn(TOKENS, heads, values), torch.rand(TOKENS, heads)
    decay = -torch.rand(TOKENS, heads, channels) * 3
    state = slots(heads, keys, values)
    before = state.clone()
    output = delta_rule(q, k, v, beta if corrects else None, decay, state, SEQUENCES)
    for start, count, source, target in zip(STARTS, [*COUNTS, 1, 1, 1], SOURCES, TARGETS, strict=True):
        own = before[source].double()
        for at in range(start, start + count):
            own = own * decay[at].double().exp()[:, :, None]
            key = k[at].double()[:, :, None]
            added = v[at].double()
            if corrects:
                added = beta[at].double()[:, None] * (added - (own * key).sum(1))
            own = own + key * added[:, None]
            close(output[at], (own * q[at].double()[:, :, None]).sum(1))
        close(state[target], own)
    for slot in set(range(10)) - set(TARGETS):
        assert torch.equal(state[slot], before[slot])


def test_a_convolution_over_what_came_before() -> None:
    torch.manual_seed(2)
    channels, kernel = 6, 4
    x, weight, bias = (
        torch.randn(TOKENS, channels),
        torch.randn(channels, 1, kernel),
        torch.randn(channels),
    )
    state = slots(kernel - 1, channels)
    before = state.clone()
    output = convolve(x, weight, bias, state, SEQUENCES)
    for start, count, source, target in zip(STARTS, [*COUNTS, 1, 1, 1], SOURCES, TARGETS, strict=True):
        seen = torch.cat((before[source], x[start : start + count])).double()
        for at in range(count):
            window = seen[at : at + kernel] * weight[:, 0].t().double()
            close(output[start + at], window.sum(0) + bias.double())
        assert torch.equal(state[target].double(), seen[-(kernel - 1) :])
    for slot in set(range(10)) - set(TARGETS):
        assert torch.equal(state[slot], before[slot])
