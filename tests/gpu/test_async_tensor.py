"""Tensor groups that send while they multiply, on CUDA and NCCL: their gradients match those of groups that wait."""

import pytest
import torch

from builders.train.gradients import whole_gradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no two CUDA devices: nothing was sent"),
]
BOUNDS = {"Float32": 1e-4, "BFloat16": 3e-2}
"""Maximum difference, relative to the gradient's norm."""


@pytest.mark.parametrize("rows", [2, 16], ids="{} sequences".format)
@pytest.mark.parametrize("precision", ["Float32", "BFloat16"])
@pytest.mark.parametrize("activations", ["Keep", "KeepProducts"])
def test_gradients_are_those_of_groups_that_wait(data, parent, tmp_path, rows, precision, activations):
    """For up to 2048 tokens, torch gathers by multicast if the GPUs support it; for more, it gathers piece by piece."""
    trainer = {
        "data": {"uri": str(data)},
        "globalBatchSize": rows,
        "microBatchSize": rows,
        "model": {"layers": 3, "dim": 256, "heads": 4, "sequenceLength": 256},
        "precision": precision,
        "memory": {"activations": activations},
    }
    apart, together = (
        whole_gradient(parent, trainer, 2, tmp_path, parallelism={"tensor": 2, "asyncTensor": overlapped})
        for overlapped in (False, True)
    )
    assert together["loss"] == pytest.approx(apart["loss"], rel=BOUNDS[precision])
    for name, gradient in apart["gradients"].items():
        difference = (together["gradients"][name] - gradient).norm() / gradient.norm()
        assert difference < BOUNDS[precision], name
