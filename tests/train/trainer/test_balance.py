"""`data.balance: Speed`: a slow rank's share shrinks, and nothing else changes."""

import math
import re

import pytest

from builders.train import node, plain

STEPS, BATCH, MICRO = 20, 12, 4


@pytest.fixture
def longer(trainer):
    return {**trainer, "steps": STEPS, "globalBatchSize": BATCH, "microBatchSize": MICRO}


def test_a_slow_rank_has_less_of_each_batch_and_the_loss_is_the_same(folder, parent, longer):
    balanced = {**longer, "data": {**longer["data"], "balance": "Speed"}}
    outcomes = []
    for name, trainer in (("even", longer), ("balanced", balanced)):
        job = node.Job(folder / name, parent, trainer)
        job.worker = "workers.slowed:main"
        outcomes.append(job.run(2))
        assert set(outcomes[-1].codes.values()) == {0}, outcomes[-1].output
    even, found = outcomes
    assert "balance:" not in even.output
    shares = [tuple(map(int, pair)) for pair in re.findall(r"balance: .* by rank: (\d+) (\d+);", found.output)]
    assert shares, found.output
    assert all(sum(pair) == BATCH and pair[1] < BATCH // 2 for pair in shares), shares
    computed = {name: slow_sequences(outcome) for name, outcome in (("even", even), ("balanced", found))}
    assert sum(computed["even"]) == STEPS * BATCH // 2
    microbatches = math.ceil(shares[-1][0] / MICRO)
    assert sum(computed["balanced"][-microbatches:]) == shares[-1][1]
    trained = [told for told in found.progress if told.phase == "training"]
    assert (trained[0].shares, trained[-1].shares) == ((BATCH // 2, BATCH // 2), shares[-1])
    assert not any(told.shares for told in even.progress)
    assert [told.position for told in trained] == [BATCH * step for step in range(1, STEPS + 1)]
    bound = plain.rounding_bound(longer)
    assert bound < plain.wrong_sample(longer)
    assert found.losses == pytest.approx(even.losses, rel=bound)


def slow_sequences(outcome):
    """Of each microbatch of the slow rank."""
    return [int(count) for count in re.findall(r"the slow rank computed (\d+) sequences", outcome.output)]
