"""Every layout on CUDA and NCCL: its gradients are those of one GPU, and a killed run continues in another layout.

Ranks share a GPU if there are fewer GPUs than ranks.
"""

import json

import pytest

from builders.train import gpus, node
from builders.train.gradients import whole_gradient

pytestmark = pytest.mark.gpu
BOUND = 1e-4
"""Maximum difference in float32, relative to the gradient's norm."""
EXPERTS = {"count": 4, "activePerToken": 2, "hiddenDim": 128}
LAYOUTS = {
    "fsdp": (2, {}, {}),
    "copies": (2, {"shard": 1}, {}),
    "tensor": (2, {"tensor": 2}, {}),
    "context": (2, {"context": 2}, {}),
    "pipeline": (2, {"pipeline": 2}, {}),
    "interleaved": (2, {"pipeline": 2, "schedule": "Interleaved1F1B"}, {}),
    "zero bubble": (2, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}, {}),
    "experts": (2, {"expert": 2}, {"experts": EXPERTS}),
    "hsdp": (4, {"shard": 2}, {}),
    "fsdp x tensor": (4, {"tensor": 2}, {}),
    "experts x fsdp": (4, {"expert": 2}, {"experts": EXPERTS}),
    "pipeline x tensor x fsdp": (8, {"pipeline": 2, "tensor": 2}, {}),
    "context x tensor x fsdp": (8, {"context": 2, "tensor": 2}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_gpu(parent, trainer, tmp_path, layout):
    world, parallelism, model = LAYOUTS[layout]
    gpus.need(world)
    changed = {**trainer, "precision": "Float32", "model": {**trainer["model"], **model}}
    alone = whole_gradient(parent, changed, 1, tmp_path)
    together = whole_gradient(parent, changed, world, tmp_path, parallelism=parallelism)
    assert together["loss"] == pytest.approx(alone["loss"], rel=BOUND)
    for name, gradient in alone["gradients"].items():
        assert (together["gradients"][name] - gradient).norm() < BOUND * gradient.norm(), name


def test_killed_in_one_layout_it_goes_on_in_another(parent, trainer, folder):
    gpus.need(4)
    changed = {**trainer, "precision": "Float32"}
    whole = node.Job(folder / "whole", parent, changed).run(1)
    job, losses, restore = node.Job(folder / "killed", parent, changed), {}, node.FRESH
    layouts = {"tensor": 2}, {"pipeline": 2}, {"shard": 2}
    for number, parallelism in enumerate(layouts):
        job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
        last = number == len(layouts) - 1
        script = node.Script() if last else node.Script(kill=(12 * (number + 1), tuple(range(4))))
        outcome = job.run(4, restore, script)
        assert outcome.losses, outcome.output
        losses |= outcome.losses
        restore = restore if last else job.newest()
    assert losses == pytest.approx(whole.losses, rel=1e-2)
