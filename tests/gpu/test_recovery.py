"""Recovery of three replicas that share one GPU: one is killed, and the others and its successor train on."""

import pytest

from builders.train import gpus, node

pytestmark = pytest.mark.gpu
RANKS, KILLED = 3, 2


def test_three_replicas_on_one_gpu_recover(folder, parent, trainer, record_property):
    """The figures are those of the round after the kill, from its start to its first step."""
    gpus.need(RANKS)
    trainer = {**trainer, "globalBatchSize": 12}
    whole = node.Job(folder / "whole", parent, trainer).run(RANKS)
    assert set(whole.codes.values()) == {0}, whole.output
    job = node.Job(folder / "killed", parent, trainer)
    first = job.run(RANKS, script=node.Script(kill=(10, (KILLED,))))
    second = job.run(RANKS, job.newest())
    assert set(second.codes.values()) == {0}, second.output
    assert {**first.losses, **second.losses} == pytest.approx(whole.losses, rel=2e-2), "bfloat16, unordered sums"
    last = second.progress[-1]
    record_property("from the round's start to its first step, s", round(last.first_step_at - second.t0, 3))
    for part, seconds in last.timeline.items():
        record_property(f"{part}, s", round(seconds, 3))
