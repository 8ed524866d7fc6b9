"""Training that goes wrong, without other faults: the cost of a rollback, and its end."""

from __future__ import annotations

from simulation.parts.clock import START
from simulation.parts.lineage import BATCH, steps_of
from simulation.rollbacks import left_out
from simulation.runs.schedule import SPAN, Strike
from simulation.runs.world import LIMIT, World


def test_a_run_that_is_bad_for_good_ends_as_the_policy_says() -> None:
    undone = 0
    for seed in range(10):
        world = World(seed, schedule=(Strike(4.0, "bad_run", seed),))
        assert world.clock.run(START + SPAN + LIMIT, world.over), world.story()
        failed, borne = world.status.condition("Failed"), world.cluster.spec.failure_policy.max_restarts
        if failed is not None and failed.status == "True":
            assert failed.reason in ("ReachedMaxRestarts", "LossNotFinite"), world.story()
        assert len(world.rollbacks.recorded) <= borne + 1, world.story()
        undone += len(world.rollbacks.recorded)
    assert undone >= 8


def test_one_wrong_loss_costs_the_steps_that_the_policy_says() -> None:
    """One wrong loss costs the steps of the policy, and the samples of those steps, which are never trained on."""
    undone = 0
    for seed in range(24):
        world = World(seed, schedule=(Strike(4.0, "glitch", seed),))
        world.run()
        latest = world.storage.latest
        assert latest is not None
        last = world.storage.checkpoints[latest.uri]
        reached = last.trained[-1][1]
        lost = sum(end - begin for begin, end in left_out(world.status))
        assert reached == steps_of(last) * BATCH + lost, world.story()
        if world.rollbacks.recorded:
            assert world.cluster.spec.trainer is not None
            back = world.cluster.spec.trainer.anomalies.rollback_steps
            assert BATCH <= lost <= (back + 1) * BATCH, world.story()
            undone += 1
    assert undone >= 8
