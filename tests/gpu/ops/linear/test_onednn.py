import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.linear.base import plain
from ramify.gpu.ops.linear.onednn import OneDnnWeight, float_weight, parts


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_serves_any_number_of_rows(bias: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 40)
    offset = torch.randn(24) if bias else None
    product = plain(weight.clone(), offset)
    product.weight = float_weight(product)
    for rows in (1, 7, 16, 17, 31, 130, 517):
        x = torch.randn(rows, 40)
        y = product(x)
        assert y.shape == (rows, 24)
        torch.testing.assert_close(y, F.linear(x, weight, offset))


def test_kernels_are_compiled_for_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [parts(rows) for rows in range(1, 2049)]
    assert len({size for sizes in every for size in sizes}) == 22
    for rows, sizes in enumerate(every, 1):
        assert rows <= sum(sizes) <= rows * 5 / 4
        assert sum(sizes[:-1]) < rows
    product = plain(torch.randn(24, 40))
    product.weight = float_weight(product)
    own, seen = OneDnnWeight._padded, []

    def watched(self: OneDnnWeight, x: Tensor, bias: Tensor | None, size: int) -> Tensor:
        seen.append((len(x), size))
        return own(self, x, bias, size)

    monkeypatch.setattr(OneDnnWeight, "_padded", watched)
    assert product(torch.randn(681, 40)).shape == (681, 24)
    assert seen in ([(256, 256), (256, 256), (128, 128), (41, 48)], [])  # none where it does not serve
