"""Weights, gradients and moments in host memory, on CUDA and NCCL.

The update uses other kernels, so the numbers are close to those without offload but not equal.
"""

import json

import pytest
import torch

from builders.train import node

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device: nothing was offloaded"),
]
NEAR = 2e-2
"""Tolerance for bfloat16 and unordered sums."""
EXPERTS = {"count": 4, "hiddenDim": 256, "biasRate": 0.001}
OFFLOADED = {"offload": "State", "reshardAfterForward": "Always"}


def losses(*outcomes):
    assert set(outcomes[-1].codes.values()) == {0}, outcomes[-1].output
    by_step = {}
    for outcome in outcomes:
        by_step |= outcome.losses
    return by_step


def test_a_run_is_offloaded_killed_and_goes_on_with_and_without(folder, parent, trainer):
    """The model has experts, whose biases are on the device. It is evaluated, with digests of the resting state.

    It is in float32, because rounding in bfloat16 changes the chosen experts, which changes a loss by 7 % (seen on an
    H200).
    """
    trainer["model"]["experts"], trainer["precision"] = EXPERTS, "Float32"
    trainer |= {"evaluation": {"everySteps": 15, "sequences": 24}, "anomalies": {"corruptionCheckSteps": 5}}
    expected = losses(node.Job(folder / "plain", parent, trainer).run(1))
    job = node.Job(folder / "offloaded", parent, {**trainer, "memory": OFFLOADED})
    first = job.run(1, script=node.Script(kill=(12, (0,))))
    job.trainer = trainer
    second = job.run(1, job.newest(), node.Script(kill=(24, (0,))))
    job.trainer = {**trainer, "memory": OFFLOADED}
    third = job.run(1, job.newest())
    assert losses(first, second, third) == pytest.approx(expected, rel=NEAR)
    assert [p.evaluated.step for p in third.progress if p.evaluated][-1] == 40


@pytest.mark.parametrize(
    "parallelism",
    [{}, {"shard": 1}, {"pipeline": 2}, {"tensor": 2}],
    ids=["fsdp", "copies, which are restored by each other", "a pipeline of tied embeddings", "tensor"],
)
def test_so_is_one_of_two_gpus(folder, parent, trainer, parallelism):
    expected = losses(node.Job(folder / "plain", parent, trainer).run(1))
    job = node.Job(folder / "offloaded", parent, {**trainer, "memory": OFFLOADED})
    job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
    first = job.run(2, script=node.Script(kill=(12, (0, 1))))
    assert losses(first, job.run(2, job.newest())) == pytest.approx(expected, rel=NEAR)
