"""Shares by speed, and evaluation, in a whole job: observed in its status and log, also after a worker was killed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.drills import build_data
from builders.cluster.operator_process import Jobs, endless, paced
from builders.until import until

pytestmark = pytest.mark.usefixtures("operator")
Object = dict[str, Any]
STEPS, EVERY, BATCH = 200, 25, 12
BOUND = 2e-4
"""Maximum relative difference of losses. Another order of sums changes at most the sixth digit (measured). One sample
in twelve that is left out after a change of shares makes a difference of 1e-3."""
SHARES = re.compile(r"balance: sequences per step by rank: (\d+) (\d+);")
ROUND_2 = "round 2 is at work"


@pytest.fixture
def trainer(tmp_path: Path) -> Object:
    build_data(str(tmp_path / "data"), {}, "--validation", "0.3")
    job = endless(tmp_path / "data")
    evaluation = {"everySteps": EVERY, "sequences": 16}
    return {**job, "steps": STEPS, "globalBatchSize": BATCH, "microBatchSize": BATCH, "evaluation": evaluation}


@pytest.mark.long(
    law="tests/train/trainer/test_balance.py::test_a_slow_rank_has_less_of_each_batch_and_the_loss_is_the_same"
)
def test_a_slow_worker_has_less_and_nothing_else_is_other_also_when_one_was_killed(
    jobs: Jobs, trainer: Object, tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    fault.write_text("1 heavy 0.02")
    jobs.create("even", trainer=trainer)
    balanced = {**trainer, "data": {**trainer["data"], "balance": "Speed"}}
    pod = {"containers": [paced(FAULT=fault, PACE=0)]}
    jobs.create("balanced", trainer=balanced, pod=pod, replicas=2)

    job = jobs.wait("balanced", slow_has_less)
    jobs.kill_worker("balanced", jobs.members(job)[1])
    jobs.wait("balanced", lambda job: job["status"]["world"].get("round", 0) == 2 and slow_has_less(job))
    # The status may still show the previous round.
    until(lambda: SHARES.search(of_round_2(jobs)), "shares in round 2", lambda: of_round_2(jobs))
    fault.unlink()  # The remaining steps are faster.
    job, even = (jobs.wait_true(name, "Complete") for name in ("balanced", "even"))
    assert (job["status"].get("rounds", 0), job["status"]["restarts"].get("inWindow", 0)) == (2, 1)
    logs = {name: jobs.logs(jobs.members(each)[0]) for name, each in (("balanced", job), ("even", even))}
    for part in logs["balanced"].split(ROUND_2):
        match = SHARES.search(part)
        assert match
        fast, slow = map(int, match.groups())
        assert fast + slow == BATCH
        assert slow < BATCH // 2

    expected, seen = evaluations(logs["even"]), evaluations(logs["balanced"])
    assert sorted(expected) == sorted(seen) == list(range(EVERY, STEPS + 1, EVERY))
    assert seen == pytest.approx(expected, rel=BOUND)
    last = {name: each["status"]["progress"] for name, each in (("balanced", job), ("even", even))}
    assert last["balanced"]["evaluation"]["step"] == last["even"]["evaluation"]["step"] == STEPS
    assert last["balanced"]["evaluation"]["loss"] == pytest.approx(last["even"]["evaluation"]["loss"], rel=BOUND)
    assert last["balanced"]["loss"] == pytest.approx(last["even"]["loss"], rel=BOUND)


def of_round_2(jobs: Jobs) -> str:
    """Return the part of rank 0's log about round 2."""
    return jobs.logs(jobs.members(jobs.get("balanced"))[0]).partition(ROUND_2)[2]


def slow_has_less(job: Object) -> bool:
    """Return whether the status gives rank 1's replica the smallest share."""
    shares = job.get("status", {}).get("batchAssignment", ())
    if len(shares) != 2 or shares[0]["sequences"] == BATCH // 2:
        return False
    assert sum(share["sequences"] for share in shares) == BATCH
    assert shares[0]["factor"] == pytest.approx(2 * shares[0]["sequences"] / BATCH, abs=1e-3)
    return bool(shares[0]["replica"] == Jobs.members(job)[1])


def evaluations(log: str) -> dict[int, float]:
    """Return the logged evaluations by step; a repeated one must have the same result."""
    loss_by_step: dict[int, float] = {}
    for step, loss in re.findall(r"step (\d+): evaluation loss ([\d.]+), perplexity [\d.e+]+,.* \(mean of", log):
        assert loss_by_step.setdefault(int(step), float(loss)) == pytest.approx(float(loss), rel=BOUND)
    return loss_by_step
