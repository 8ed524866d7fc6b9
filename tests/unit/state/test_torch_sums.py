"""Sums by which a script's ranks check that they hold equal arrays."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainingjob import _torch_ranks


class LargestCopy(TorchDispatchMode):
    """Mode that records the size in bytes of the largest copy that an operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        if operation is torch.ops.aten._to_copy.default:
            self.bytes = max(self.bytes, result.nbytes)
        return result


def test_a_large_tensor_is_added_up_in_pieces(monkeypatch):
    monkeypatch.setattr(_torch_ranks, "PIECE", 1000)
    tensor = torch.randn(123, 45)
    with LargestCopy() as made:
        found = _torch_ranks._sum(tensor)
    assert 0 < made.bytes <= 8 * 1000
    assert found.item() == pytest.approx(tensor.double().sum().item(), rel=1e-12)


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.tensor(2.5), torch.ones(3, dtype=torch.bool)])
def test_any_shape_and_dtype_has_a_sum(tensor):
    assert _torch_ranks._sum(tensor).item() == tensor.double().sum().item()
