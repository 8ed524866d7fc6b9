"""Planned memory of norms, which CUDA computes in one kernel."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from concertina_trainer.planning.fake import norms_of_cuda

ROWS, DIM = 6, 32


def norm(dtype, weight_dtype):
    """Return the input, the weight, the result, and the tensors kept for the backward pass by their addresses."""
    x = torch.empty(ROWS, DIM, dtype=dtype).requires_grad_()
    weight = torch.empty(DIM, dtype=weight_dtype).requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = nn.functional.rms_norm(x, (DIM,), weight, 1e-6)
    return x, weight, result, kept.values()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_keeps_its_input_and_one_number_for_each_row(dtype):
    with FakeTensorMode(), norms_of_cuda():
        x, weight, result, kept = norm(dtype, dtype)
        assert (result.shape, result.dtype) == (x.shape, dtype)
        assert sum(tensor.nbytes for tensor in kept) == x.nbytes + weight.nbytes + ROWS * 4
        result.backward(torch.empty_like(result))
        assert [(each.grad.shape, each.grad.dtype) for each in (x, weight)] == [
            (x.shape, dtype),
            (weight.shape, dtype),
        ]


def test_operations_of_a_cpu_keep_more():
    with FakeTensorMode():
        x, _, _, kept = norm(torch.bfloat16, torch.bfloat16)
        assert sum(tensor.nbytes for tensor in kept) > 4 * x.nbytes


def test_a_norm_of_two_dtypes_is_composed():
    """CUDA's kernel takes one dtype."""
    with FakeTensorMode():
        _, _, _, composed = norm(torch.bfloat16, torch.float32)
        with norms_of_cuda():
            _, _, _, kept = norm(torch.bfloat16, torch.float32)
        assert [(each.shape, each.dtype) for each in kept] == [(each.shape, each.dtype) for each in composed]
