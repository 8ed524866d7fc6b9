"""Scripts of tests/programs/loops that need a GPU: they are killed and restarted, in the same and in other worlds."""

import pytest
import torch

from builders.train.killed_cases import Case, Equal, killed_and_started_again
from builders.train.node import Parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="this machine has no CUDA device: no script was run on it"
    ),
]
ROUNDED = Equal(1e-4, "a GPU adds up in an order of its own")
CASES = [
    Case("devices:mixed", same=ROUNDED, other=ROUNDED, parent="loops.devices"),
    Case("devices:synchronized", same=ROUNDED, other=ROUNDED, parent="loops.devices"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_killed_and_started_again(folder, case):
    """The ranks of each loop share one GPU and communicate by gloo."""
    parent = Parent(case.parent)
    try:
        killed_and_started_again(folder, parent, case, case.kill, (case.first, *case.others))
    finally:
        parent.close()
