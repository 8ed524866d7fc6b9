"""Digests of tensors: which tensors they distinguish, and how often the host waits for them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from concertina_trainer.training.digests import digest, hashes, mixed

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default, torch.ops.aten.equal.default)
"""Operations for which the host waits for a device."""


class HostReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        self.count += operation in READS
        return operation(*arguments, **(keywords or {}))


def tensors():
    torch.manual_seed(0)
    return [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.empty(0), torch.randn(2), torch.arange(4)]


def test_a_bit_or_an_order_makes_another_digest():
    same, changed = digest(tensors()), tensors()
    changed[1].view(torch.int16)[3] ^= 1
    assert digest(tensors()) == same
    assert digest(changed) != same
    assert digest(list(reversed(tensors()))) != same


def test_one_digest_of_many_tensors_has_no_read_for_each():
    """On a GPU, `tolist` waits once; on a CPU it is no operation."""
    many = [torch.full((4,), float(number)) for number in range(300)]
    with HostReads() as reads:
        digest(many)
    assert reads.count <= 1


def test_hashes_are_read_when_they_are_mixed():
    some = tensors()
    with HostReads() as reads:
        hash_values = hashes(some)
    assert reads.count == 0
    assert mixed(hash_values) == digest(tensors())
