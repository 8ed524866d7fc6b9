"""Workers that stay in their process on CUDA and NCCL: one is killed, then all change ranks."""

import pytest

from builders.train import gpus, node

pytestmark = pytest.mark.gpu


def test_survivors_of_nccl_groups_go_on_in_their_process(folder, parent, trainer, record_property):
    """Off by default, so that this test switches it on: CONCERTINA_GPU_STAYS."""
    gpus.need(2)
    whole = node.Job(folder / "whole", parent, trainer).run(2)
    assert set(whole.codes.values()) == {0}, whole.output
    job = node.Job(folder / "killed", parent, trainer, stays=True)
    job.environment = {"CONCERTINA_GPU_STAYS": "1"}
    first = job.run(2, script=node.Script(kill=(10, (1,))))
    assert [survivor.pid for survivor in job.survivors] == [first.pids[0]], first.output
    second = job.run(2, job.newest(), node.Script(drain=(20, False)))
    assert second.pids[0] == first.pids[0]
    assert second.pids[1] != first.pids[1]
    assert set(second.codes.values()) == {0}, second.output
    third = job.run(2, job.newest())
    assert third.pids == {0: second.pids[1], 1: second.pids[0]}, "each has the other's rank"
    assert set(third.codes.values()) == {0}, third.output
    losses = {**first.losses, **second.losses, **third.losses}
    assert losses == pytest.approx(whole.losses, rel=2e-2), "bfloat16, unordered sums"
    for name, outcome in (("new", whole), ("survivor", second)):
        for part, seconds in outcome.progress[-1].timeline.items():
            record_property(f"{name} worker, {part}, s", round(seconds, 3))
