"""The trainer on CUDA and NCCL: the same code as on CPU, with snapshots, a kill and a resume."""

import json

import pytest
import torch

from builders.train import gpus, node

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device: NCCL was not tried"),
]


def test_a_killed_run_on_a_gpu_goes_on_from_its_snapshot(folder, parent, trainer):
    whole = node.Job(folder / "whole", parent, trainer).run(1)
    assert whole.codes == {0: 0}, whole.output
    assert whole.losses[40] < whole.losses[1] - 1
    job = node.Job(folder / "killed", parent, trainer)
    first = job.run(1, script=node.Script(kill=(20, (0,))))
    restore = job.newest()
    assert restore.step >= 18
    second = job.run(1, restore)
    assert second.codes == {0: 0}, second.output
    assert {**first.losses, **second.losses} == pytest.approx(whole.losses, rel=2e-2), "bfloat16, unordered sums"


def waits(job, steps, world=1):
    job.trainer = {**job.trainer, "steps": steps}
    outcome = job.run(world)
    assert set(outcome.codes.values()) == {0}, outcome.output
    return outcome.output.count("called a synchronizing CUDA operation")


def test_the_host_waits_once_a_step(folder, parent, trainer):
    """The host waits for the loss, the norm and the flags at once. A snapshot is taken at each step meanwhile."""
    few, many = node.Job(folder / "few", parent, trainer), node.Job(folder / "many", parent, trainer)
    few.worker = many.worker = "workers.syncs:main"
    assert waits(many, 40) - waits(few, 20) == 20


def test_the_host_waits_once_more_for_a_layer_with_experts_of_several_ranks(folder, parent, trainer):
    """Count as tests/train/trainer/test_host_waits.py does on a CPU. All ranks are on one GPU if there is only one."""
    gpus.need(2)
    layers, experts = 2, {"count": 4, "hiddenDim": 64, "shared": 1, "biasRate": 0.01}
    model = {**trainer["model"], "layers": layers, "experts": experts}
    changed = {**trainer, "globalBatchSize": 4, "microBatchSize": 2, "model": model}
    few, many = node.Job(folder / "few", parent, changed), node.Job(folder / "many", parent, changed)
    for job in (few, many):
        job.worker = "workers.syncs:main"
        job.environment = {"CONCERTINA_PARALLELISM": json.dumps({"expert": 2})}
    assert waits(many, 20, world=2) - waits(few, 10, world=2) == 10 * 2 * (1 + layers)
