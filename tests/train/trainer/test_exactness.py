"""Test that a run has the same results for any history of interruptions.

A run is interrupted five times, in worlds of 4, 3, 1, 2 and 4 workers, and compared with one worker without
interruptions. With `determinism: Bitwise`, every loss and the final weights have the same bits.
"""

import pytest
import torch

from builders.train import node, plain, states

HISTORY = ((4, 3), (3, 5), (1, 7), (2, 9), (4, 11))
"""Workers of each round, and the step at which it is interrupted: by SIGKILL and by a drain in turn."""
STEPS = 13


def uninterrupted(folder, parent, trainer, world=1):
    job = node.Job(folder, parent, trainer)
    outcome = job.run(world)
    assert set(outcome.codes.values()) == {0}, outcome.output
    return job, outcome.losses


def interrupted(folder, parent, trainer, bound=0.0, stays=False):
    """Return the job, its losses by step, and the positions consumed by then.

    A step that was trained again must have the same loss.
    """
    job = node.Job(folder, parent, trainer, stays=stays)
    restore, losses, positions = node.FRESH, {}, {}
    for i, (world, step) in enumerate((*HISTORY, (2, None))):
        script = None
        if step is not None:
            script = node.Script(drain=(step, False)) if i % 2 else node.Script(kill=(step, (world - 1,)))
        survivors = {survivor.pid for survivor in job.survivors}
        outcome = job.run(world, restore, script)
        assert len(survivors & set(outcome.pids.values())) == min(len(survivors), world)
        assert len(job.survivors) == (world - (i % 2 == 0) if stays and step else 0)
        for told in outcome.progress:
            if told.phase == "training":
                assert losses.setdefault(told.step, told.loss) == pytest.approx(told.loss, rel=bound, abs=0)
                assert positions.setdefault(told.step, told.position) == told.position
                losses[told.step] = told.loss
        restore = job.newest()
        (said,) = states.replicated(job)
        assert len(said) > 200, "every rank has written the same of what all of them hold"
    assert restore.step == STEPS
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert job.number == len(HISTORY) + 1
    return job, losses, positions


@pytest.fixture
def longer(trainer):
    return {**trainer, "steps": STEPS, "globalBatchSize": 15}


@pytest.mark.parametrize("stays", [pytest.param(True, id="in process"), pytest.param(False, id="forked")])
def test_bitwise_every_loss_and_weight_is_the_same(folder, parent, longer, stays):
    check_bits(folder, parent, longer, stays)


LAW = "tests/train/trainer/test_exactness.py::test_bitwise_every_loss_and_weight_is_the_same[in process]"


@pytest.mark.long(law=LAW)
def test_so_it_is_with_muon(folder, parent, longer):
    """Whose matrices have as many rows as the ranks divide unevenly."""
    model = {**longer["model"], "hiddenDim": 45}
    check_bits(folder, parent, {**longer, "model": model}, True, name="Muon")


def check_bits(folder, parent, longer, stays, **optimizer):
    bitwise = {**longer, "determinism": "Bitwise", "optimizer": {**longer["optimizer"], "emaDecay": 0.9, **optimizer}}
    whole, expected = uninterrupted(folder / "a", parent, bitwise)
    job, losses, positions = interrupted(folder / "b", parent, bitwise, stays=stays)
    assert losses == expected
    assert positions == {step: 15 * step for step in range(1, STEPS + 1)}
    reference, found = states.whole(whole), states.whole(job)
    assert found.keys() == reference.keys() > {"optimizer.ema.embedding.weight"}
    for name, value in reference.items():
        assert torch.equal(found[name].view(torch.int32), value.view(torch.int32)), name


ROUNDING = (
    "tests/train/trainer/test_exactness.py::test_interrupted_and_resized_the_loss_differs_by_rounding_alone[in process]"
)


@pytest.mark.parametrize(
    "stays",
    [pytest.param(True, id="in process"), pytest.param(False, id="forked", marks=pytest.mark.long(law=ROUNDING))],
)
def test_interrupted_and_resized_the_loss_differs_by_rounding_alone(folder, parent, longer, stays):
    bound = plain.rounding_bound(longer)
    assert bound < plain.wrong_sample(longer)
    _, expected = uninterrupted(folder / "a", parent, longer)
    _, losses, positions = interrupted(folder / "b", parent, longer, bound, stays=stays)
    assert positions == {step: 15 * step for step in range(1, STEPS + 1)}
    assert losses == pytest.approx(expected, rel=bound)
