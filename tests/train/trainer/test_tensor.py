"""Test a block that is divided over a tensor group.

It computes the same as a block in which the collectives are written out as in the papers, and as one process.
"""

import pytest
import torch

from builders.train.gradients import computed

LAW = "tests/train/trainer/test_tensor.py::test_a_block_is_that_of_the_papers[2]"


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.long(law=LAW))])
def test_a_block_is_that_of_the_papers(parent, trainer, tmp_path, degree):
    model = {**trainer["model"], "heads": 8, "kvHeads": 4, "hiddenDim": 44}
    found = computed(
        parent, "workers.by_hand:main", {**trainer, "model": model}, degree, tmp_path, {"tensor": degree}
    )  # fmt: skip
    assert len(found["ours"]) == 2 + 9, "the result, and the gradients of its input and of nine weights"
    for name, expected in found["one process"].items():
        assert expected.any()
        for whose in ("by hand", "ours", "overlapped"):
            torch.testing.assert_close(
                found[whose][name], expected, rtol=1e-10, atol=1e-12, msg=lambda said, of=(whose, name): f"{of}: {said}"
            )  # fmt: skip
