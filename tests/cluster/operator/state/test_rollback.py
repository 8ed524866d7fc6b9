"""Rollback of a run whose loss really jumps: it skips the cause and completes. Checkpoints follow Daly's interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, endless, paced
from builders.strange import check_went_back, rolling_back, strange
from concertina.api.status import unix_seconds

pytestmark = pytest.mark.usefixtures("operator")
Object = dict[str, Any]


@pytest.mark.long(
    law="tests/simulation/stories/test_rollbacks.py::test_one_wrong_loss_costs_the_steps_that_the_policy_says"
)
def test_a_loss_that_jumps_is_undone_and_checkpoints_follow_the_clock(jobs: Jobs, data: Path, tmp_path: Path) -> None:
    """Both jobs run at the same time, because the second one waits for its checkpoint interval."""
    checkpoint = {"uri": f"file://{tmp_path}/clock", "everySeconds": "Auto"}
    jobs.create("clock", trainer=endless(data), pod={"containers": [paced()]}, checkpoint=checkpoint)
    bad = strange(tmp_path)
    jobs.create("spike", replicas=2, **rolling_back(bad, {"uri": f"file://{tmp_path}/spike"}))
    job = jobs.wait_true("spike", "Complete")
    log = jobs.logs(jobs.members(job)[0])
    check_went_back(bad, job["status"], log, lambda reason: jobs.events("spike", reason)[0]["message"])
    follows_the_clock(jobs)


def follows_the_clock(jobs: Jobs) -> None:
    """Check that there is a checkpoint, which `everySeconds: Auto` alone has caused."""
    job = jobs.wait("clock", lambda job: job.get("status", {}).get("checkpointInterval", {}).get("saveSeconds"))
    status = job["status"]
    assert status["checkpointInterval"]["seconds"] == status["checkpointInterval"]["suggestedSeconds"] >= 10
    job = jobs.wait("clock", lambda job: job["status"].get("lastCheckpoint"))
    began, saved = job["status"]["world"]["since"], job["status"]["lastCheckpoint"]["at"]
    assert unix_seconds(saved) - unix_seconds(began) >= 10
    jobs.kill_worker("clock", jobs.members(job)[0])

    def twice_as_often(job: Object) -> bool:
        status = job["status"]
        elapsed = unix_seconds(status["goodput"]["at"]) - unix_seconds(status["startTime"])
        return bool(status["world"]["round"] == 2 and status["checkpointInterval"]["failureSeconds"] < 0.75 * elapsed)

    jobs.wait("clock", twice_as_often)
