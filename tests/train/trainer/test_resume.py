"""Exactness: interrupted and resized runs against uninterrupted ones, with real workers, kills and restores."""

import pytest

from builders.train import node, plain

REASSOCIATION = 2e-4
"""Most that a loss may differ: another world adds the same float32 numbers in another order, and twelve steps of a
large learning rate amplify what that leaves (about 1e-6 after one step)."""


def check(losses, reference):
    assert list(losses) == list(reference)
    assert losses == pytest.approx(reference, rel=REASSOCIATION)


@pytest.fixture(scope="module")
def reference(folder_of_module, parent, trainer):
    """Return the losses of a run of one worker without interruptions."""
    outcome = node.Job(folder_of_module, parent, trainer).run(world=1)
    assert outcome.codes == {0: 0}, outcome.output
    assert list(outcome.losses) == list(range(1, 13))
    return outcome.losses


def test_the_reference_is_what_plain_pytorch_gives(trainer, reference):
    check(reference, plain.losses(trainer))


@pytest.mark.long(
    law="tests/train/trainer/test_exactness.py::test_interrupted_and_resized_the_loss_differs_by_rounding_alone"
)
def test_every_world_has_the_same_losses(folder, parent, trainer, reference):
    outcome = node.Job(folder, parent, trainer).run(world=3)
    assert outcome.codes == {0: 0, 1: 0, 2: 0}, outcome.output
    assert {done.outcome for done in outcome.done.values()} == {"complete"}
    check(outcome.losses, reference)
    assert [p.position for p in outcome.progress if p.phase == "training"] == [7 * step for step in range(1, 13)]


def test_killed_and_resized_it_goes_on_as_if_nothing_had_been(folder, parent, trainer, reference):
    """3 workers; node 1 is lost with its memory; 2 workers, the coordinator's is lost; 3, drained; 2 to the end."""
    job = node.Job(folder, parent, trainer)
    first = job.run(3, script=node.Script(kill=(4, (1,)), kill_with=3))
    job.lose(1)
    second_from = job.newest()
    assert 3 <= second_from.step < 7

    second = job.run(2, second_from, node.Script(kill=(7, (0,)), kill_with=6))
    assert second.progress[-1].restored_step == second_from.step, second.output
    job.lose(0)
    third_from = job.newest()
    assert third_from.id.round == 2
    assert 6 <= third_from.step < 9

    third = job.run(3, third_from, node.Script(drain=(9, False)))
    assert set(third.codes.values()) == {0}, third.output
    drained = {done.step for done in third.done.values()}
    assert {done.outcome for done in third.done.values()} == {"drained"}
    assert len(drained) == 1

    last_from = job.newest()
    assert last_from.step == drained.pop(), "a drain costs no step"
    last = job.run(2, last_from)
    assert set(last.codes.values()) == {0}, last.output
    check({**first.losses, **second.losses, **third.losses, **last.losses}, reference)
    assert last.progress[-1].position == 7 * 12


def test_the_same_layout_is_restored_bit_by_bit(folder, parent, trainer):
    whole = node.Job(folder / "a", parent, trainer)
    uninterrupted = whole.run(2).losses
    job = node.Job(folder / "b", parent, trainer)
    job.run(2, script=node.Script(kill=(5, (0, 1))))
    resumed = job.run(2, job.newest())
    for step, loss in resumed.losses.items():
        assert loss == uninterrupted[step]


def test_peers_that_lag_cost_snapshots_and_no_wait(folder, parent, trainer):
    """Copies stop after step 2: step 2 stays whole on all nodes, 3 and 4 are taken, and a kill falls back to step 2."""
    job = node.Job(folder, parent, trainer)
    outcome = job.run(2, script=node.Script(copy=lambda step: step <= 2, kill=(9, (0, 1))))
    assert outcome.progress[-1].snapshot_step == 2
    job.lose(1)
    assert job.newest().step == 2
