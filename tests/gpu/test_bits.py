"""`determinism: Bitwise` on CUDA and NCCL: the same bits in any world, and after a kill."""

import pytest

from builders.train import gpus, node, states

HISTORY = ((2, 4), (1, 8), (2, None))
"""Number of workers of each round, and the step at which one of them is killed."""


@pytest.mark.gpu
def test_every_loss_and_weight_is_the_same(parent, trainer, folder):
    gpus.need(2)
    bitwise = {**trainer, "steps": 12, "determinism": "Bitwise"}
    whole = node.Job(folder / "whole", parent, bitwise)
    expected = whole.run(1)
    assert set(expected.codes.values()) == {0}, expected.output
    job, losses, restore = node.Job(folder / "killed", parent, bitwise), {}, node.FRESH
    for world, step in HISTORY:
        outcome = job.run(world, restore, node.Script(kill=step and (step, (world - 1,))))
        losses |= outcome.losses
        restore = job.newest()
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert losses == expected.losses
    actual, reference = states.whole(job), states.whole(whole)
    assert actual.keys() == reference.keys()
    assert all(actual[name].equal(value) for name, value in reference.items())
