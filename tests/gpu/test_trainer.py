"""The trainer on CUDA and NCCL: the same code as on CPU, with snapshots, a kill and a resume."""

import pytest
import torch

from builders.train import node

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


def waits(job, steps):
    job.trainer = {**job.trainer, "steps": steps}
    outcome = job.run(1)
    assert outcome.codes == {0: 0}, outcome.output
    return outcome.output.count("called a synchronizing CUDA operation")


def test_the_host_waits_once_a_step(folder, parent, trainer):
    """The host waits for the loss, the norm and the flags at once. A snapshot is taken at each step meanwhile."""
    few, many = node.Job(folder / "few", parent, trainer), node.Job(folder / "many", parent, trainer)
    few.worker = many.worker = "workers.syncs:main"
    assert waits(many, 40) - waits(few, 20) == 20
