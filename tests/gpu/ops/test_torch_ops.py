"""The operations on torch, each against its definition."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.kv.layout import KVPool, LayerKV, PairLayout
from ramify.gpu.ops.base import LayerAttention, ResidualStream
from ramify.gpu.ops.linear.base import plain
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.ops.torch_ops import TorchOps, tokens_of
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import StepInputs

CPU = torch.device("cpu")
LAST = torch.tensor([40, 41, 42])


class Echo:
    """In place of attention: each token's queries, times 2."""

    def attend(self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec) -> Tensor:
        return q.flatten(1) * 2


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


@pytest.fixture
def pool() -> KVPool:
    return PairLayout(((2, 8),) * 2, torch.float32).allocate(4, 4, CPU)


@pytest.fixture
def ops(pool: KVPool) -> TorchOps:
    return TorchOps(pool, LAST, cast(Any, Echo()))


def norm(size: int) -> RMSNorm:
    return RMSNorm(torch.rand(size) + 0.5, 1e-6)


def step_of(ids: list[int], positions: list[int], slots: list[int]) -> StepInputs[Tensor]:
    parts = {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "slots": torch.tensor(slots),
    }
    return StepInputs.from_parts(Bucket(0, 0, len(ids), len(ids)), parts)


def test_tokens_are_given_or_those_that_a_row_sampled() -> None:
    assert tokens_of(torch.tensor([7, -1, 0, -3], dtype=torch.int32), LAST).tolist() == [7, 40, 0, 42]


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_embed(ops: TorchOps, scale: float) -> None:
    table, first = torch.randn(50, 16), norm(16)
    step = step_of([3, -2], [0, 1], [0, 1])
    ops.begin(step)
    x = ops.embed(step, table, scale, first)
    assert torch.equal(x.residual, table[[3, 41]] * scale)
    torch.testing.assert_close(x.normed, F.rms_norm(x.residual, (16,), first.weight, first.eps))
    assert table[3].ne(0).any()  # `add_norm` writes in place: not into the table
    ops.add_norm(x, ops.project(torch.randn(2, 16), plain(torch.randn(16, 16))), first)
    assert not torch.equal(x.residual, table[[3, 41]] * scale)


@pytest.mark.parametrize("post", [False, True])
def test_add_sums_then_normalises(ops: TorchOps, post: bool) -> None:
    residual, y, linear = torch.randn(3, 16), torch.randn(3, 24), plain(torch.randn(16, 24))
    following, own = norm(16), norm(16)
    added = y @ linear.tensor.T
    if post:
        added = F.rms_norm(added, (16,), own.weight, own.eps)
    wanted = residual + added
    stream, projection = ResidualStream(residual.clone(), residual), ops.project(y, linear)
    x = ops.add_norm(stream, projection, following, own if post else None)
    torch.testing.assert_close(x.residual, wanted)
    torch.testing.assert_close(x.normed, F.rms_norm(wanted, (16,), following.weight, following.eps))


def test_linear_and_gated(ops: TorchOps) -> None:
    x = ResidualStream(torch.randn(3, 16), torch.randn(3, 16))
    linear = plain(torch.randn(20, 16), torch.randn(20))
    both = F.linear(x.normed, linear.tensor, linear.bias)
    torch.testing.assert_close(ops.linear(x, linear), both)
    gate, up = both[:, :10], both[:, 10:]
    torch.testing.assert_close(ops.gated(x, linear, "silu"), F.silu(gate) * up)
    wanted = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(ops.gated(x, linear, "gelu_tanh"), wanted)


@pytest.mark.parametrize("lines", [None, [2, 0]])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_head(ops: TorchOps, lines: list[int] | None, softcap: float | None) -> None:
    x, linear = ResidualStream(torch.randn(3, 16), torch.randn(3, 16)), plain(torch.randn(30, 16))
    wanted = x.normed[lines if lines is not None else slice(None)] @ linear.tensor.T
    if softcap is not None:
        wanted = softcap * torch.tanh(wanted / softcap)
    index = None if lines is None else torch.tensor(lines)
    torch.testing.assert_close(ops.head(x, index, linear, softcap), wanted)
    output = torch.empty_like(wanted)
    assert ops.head(x, index, linear, softcap, output) is output
    torch.testing.assert_close(output, wanted)


@pytest.mark.parametrize("normed", [False, True])
def test_attend_rotates_stores_and_attends(ops: TorchOps, pool: KVPool, normed: bool) -> None:
    """Two layers with rotary bases of their own in one step; each layer has its own keys."""
    norms = (norm(8), norm(8)) if normed else (None, None)
    step = step_of([1, 2], [5, 0], [9, 3])
    ops.begin(step)
    for index, theta in enumerate((100.0, 10_000.0)):
        rotary = Rotary({"rope_type": "default", "rope_theta": theta}, 8, 64, CPU)
        layer = LayerAttention(index, 4, 2, 8, AttentionSpec(0.5), rotary, *norms)
        qkv = torch.randn(2, 8 * 8)
        q, k, v = qkv.view(2, 8, 8).split([4, 2, 2], 1)
        if norms[0] is not None and norms[1] is not None:
            q, k = norms[0](q), norms[1](k)
        angles = step.positions[:, None].float() * theta ** (-torch.arange(4) / 4)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def turned(x: Tensor, turn: Tensor = turn) -> Tensor:
            both = torch.complex(*x.contiguous().chunk(2, -1)) * turn
            return torch.cat((both.real, both.imag), -1)

        torch.testing.assert_close(ops.attend(qkv, layer, step), turned(q).flatten(1) * 2)
        torch.testing.assert_close(pool.layers[index].k[[9, 3]], turned(k))
        torch.testing.assert_close(pool.layers[index].v[[9, 3]], v)
