"""A run that really turns bad goes back, leaves out what led there and completes; and checkpoints by Daly's clock."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from builders.operator import FAULTS, Jobs
from builders.strange import BATCH, LENGTH, STEPS, noisy, strange
from concertina.api.status import unix_seconds
from concertina_agent.protocol import Undone
from concertina_trainer.config import DataConfig
from concertina_trainer.data.reader import Reader
from concertina_trainer.data.skips import positions
from concertina_trainer.storage.stored import StoredCheckpoint

pytestmark = pytest.mark.usefixtures("operator")
Object = dict[str, Any]
BACK = 12


def pod(fault: Path) -> Object:
    """A container under the faults of tests/train/faults."""
    environment = [{"name": "PYTHONPATH", "value": str(FAULTS)}, {"name": "FAULT", "value": str(fault)}]
    return {"containers": [{"name": "trainer", "image": "concertina/trainer:test", "env": environment}]}


def test_a_loss_that_jumps_is_undone_and_checkpoints_follow_the_clock(jobs: Jobs, data: Path, tmp_path: Path) -> None:
    """Both jobs at the same time, as the second one waits for its clock."""
    model = {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 32}
    trainer = {"steps": 1_000_000, "model": model, "data": {"uri": str(data)}, "globalBatchSize": 4}
    jobs.create("clock", trainer=trainer, checkpoint={"uri": f"file://{tmp_path}/clock", "everySeconds": "auto"})
    bad, step = strange(tmp_path)
    (tmp_path / "fault").write_text("0 slow 0.03")  # so that checkpoints of before are in storage by then
    anomalies = {"spike": "RollBack", "spikeDeviations": 2, "rollbackSteps": BACK}
    checkpoint = {"uri": f"file://{tmp_path}/spike", "everySteps": 10, "keep": 1}
    jobs.create(
        "spike", replicas=2, pod=pod(tmp_path / "fault"), trainer={**bad, "anomalies": anomalies}, checkpoint=checkpoint
    )
    goes_back(jobs, bad, step)
    follows_the_clock(jobs)


def goes_back(jobs: Jobs, trainer: Object, step: int) -> None:
    job = jobs.wait_true("spike", "Complete")
    status, back = job["status"], job["status"]["rollback"]
    assert (back["round"], back["step"], back["reason"]) == (1, step - BACK, "LossSpike")
    [(begin, end)] = positions((step - BACK) * BATCH, (step + 1) * BATCH, ())
    assert status["skipped"] == [{"begin": begin, "end": end}]
    assert status["world"]["round"] == 2
    [entry] = status["restarts"]["recent"]
    assert (entry["reason"], entry["counted"]) == ("LossSpike", True)
    assert f"back to step {step - BACK} or before" in jobs.events("spike", "RolledBack")[0]["message"]
    assert f"samples {begin} to {end - 1}" in jobs.events("spike", "SamplesLeftOut")[0]["message"]
    log = jobs.logs(jobs.members(job)[0])
    assert f"samples {begin} to {end - 1} left out" in log
    [restored] = re.findall(r"round 2 is at work: step \d+, state from storage of step (\d+)", log)
    assert int(restored) <= step - BACK

    last = StoredCheckpoint(status["lastCheckpoint"]["uri"]).manifest
    assert (last.id.step, last.position, last.complete) == (STEPS, STEPS * BATCH, True)
    assert (last.skipped, last.undone) == (((begin, end),), (Undone(1, step - BACK),))
    consumed = Reader(DataConfig.model_validate(trainer["data"]), LENGTH, trainer["seed"], last.skipped)
    assert noisy(consumed) == [], "none of what led there was trained on"


def follows_the_clock(jobs: Jobs) -> None:
    """With `everySeconds: auto` alone there is a checkpoint at all only by its clock."""
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
