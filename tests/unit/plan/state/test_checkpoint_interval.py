"""`everySeconds: Auto`: the failures that the trainer is told of, and the interval that it reports."""

from dataclasses import replace

import pytest

from builders import jobs
from concertina.api.parse import SpecError
from concertina.plan.facts.context import JobContext
from concertina.plan.plan import plan
from concertina.plan.rounds import commits
from concertina_protocol import CheckpointInterval, SnapshotInterval


def test_a_round_is_told_how_long_the_job_has_run_and_how_often_it_failed():
    seen = jobs.running(jobs.spec())
    restarts = seen.job.status.restarts.model_copy(update={"total": 4})
    job = replace(seen.job, status=seen.job.status.model_copy(update={"restarts": restarts}))
    history = commits._history(JobContext(replace(seen, job=job), job.spec, jobs.T0 + 1010))
    assert (history.failures, round(history.seconds)) == (4, 1000)


def test_the_interval_stands_in_the_status():
    seen = jobs.running(jobs.spec())
    coordinator = seen.agents["demo-0-0"]
    progress = replace(coordinator.report.progress, step=41, interval=CheckpointInterval(None, 84.3, 0.01234, 3600.4))
    agents = {**seen.agents, "demo-0-0": replace(coordinator, report=replace(coordinator.report, progress=progress))}
    interval = plan(replace(seen, agents=agents), jobs.T0 + 60).status.checkpoint_interval
    assert (interval.seconds, interval.suggested_seconds, interval.save_seconds, interval.failure_seconds) == (
        0,
        84,
        0.012,
        3600,
    )


def test_how_often_snapshots_are_taken_stands_in_the_status_until_it_is_reported_anew():
    seen = jobs.running(jobs.spec())
    coordinator = seen.agents["demo-0-0"]

    def status(observed, snapshots):
        progress = replace(coordinator.report.progress, step=41, snapshots=snapshots)
        agents = {
            **observed.agents,
            "demo-0-0": replace(coordinator, report=replace(coordinator.report, progress=progress)),
        }
        return plan(replace(observed, agents=agents), jobs.T0 + 60).status

    reported = status(seen, SnapshotInterval(7, 0.00941))
    assert (reported.snapshot_interval.steps, reported.snapshot_interval.overhead) == (7, 0.0094)
    later = replace(seen, job=replace(seen.job, status=reported))
    assert status(later, None).snapshot_interval == reported.snapshot_interval


def test_every_seconds_is_a_number_or_auto():
    assert jobs.spec(checkpoint={"uri": "s3://bucket/x", "everySeconds": "Auto"}).checkpoint.every_seconds == "Auto"
    with pytest.raises(SpecError, match="everySeconds"):
        jobs.spec(checkpoint={"uri": "s3://bucket/x", "everySeconds": "often"})
