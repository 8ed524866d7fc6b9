"""Jobs for checkpoints: one each, bounded, and the same after a restart of the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.status import EvaluationJobState
from concertina.plan.actions import CreateEvaluationJob, DeleteEvaluationJob, DeleteJob, Plan
from concertina.plan.lifecycle.evaluation_jobs import LOOK_SECONDS
from concertina.plan.observed import EvaluationJobView, JobObservation
from concertina.plan.plan import plan

RUNNING, SUCCEEDED = (EvaluationJobView(EvaluationJobState(word)) for word in ("Running", "Succeeded"))
FAILED = EvaluationJobView(EvaluationJobState.FAILED, "BackoffLimitExceeded: it has failed")


def training(step: int = 10, views: Mapping[str, EvaluationJobView] | None = None, **job: object) -> JobObservation:
    """Return a job that trains, with a checkpoint of a step, whose Jobs were seen as in `views`."""
    seen = jobs.running(jobs.spec())
    spec = jobs.spec(checkpoint={"uri": "s3://bucket/run"}, evaluationJob={"podTemplate": "score", **job})
    seen = replace(seen, job=replace(seen.job, spec=spec), evaluation_jobs={} if views is None else views)
    return saved(seen, step)


def saved(seen: JobObservation, step: int) -> JobObservation:
    latest = protocol.Durable(jobs.UID, 1, step, f"s3://bucket/run/{step}", at=T0 + 12)
    report = jobs.coordinator_report(storage=protocol.Storage("Ready", latest))
    return replace(seen, agents={**seen.agents, "demo-0-0": replace(seen.agents["demo-0-0"], report=report)})


def name(step: int) -> str:
    return f"demo-{jobs.UID[:8]}-1-{step}"


def states(made: Plan) -> dict[int, str]:
    return {mark.step: mark.state.value for mark in made.status.evaluation_jobs}


def written(made: Plan) -> list[object]:
    return [action for action in made.actions if isinstance(action, CreateEvaluationJob | DeleteEvaluationJob)]


def after(seen: JobObservation, made: Plan, views: Mapping[str, EvaluationJobView]) -> JobObservation:
    return replace(jobs.then(seen, made), evaluation_jobs=views)


def test_a_checkpoint_gets_one_job_which_is_listed_before_it_is_created() -> None:
    seen = training()
    made = plan(seen, T0 + 13)
    assert written(made) == [CreateEvaluationJob(name(10), "s3://bucket/run/10", 10)]
    assert states(made) == {10: "Pending"}
    assert (made.recheck_after or 99) <= LOOK_SECONDS
    again = plan(after(seen, made, {}), T0 + 14)
    assert written(again) == written(made), "the same name, so that nothing is created twice"
    restarted = replace(jobs.then(seen, made), evaluation_jobs=None)
    assert written(plan(restarted, T0 + 14)) == [], "an operator that has not looked yet creates nothing"
    made = plan(after(seen, made, {name(10): RUNNING}), T0 + 15)
    assert (written(made), states(made)) == ([], {10: "Running"})
    seen = after(seen, made, {name(10): SUCCEEDED})
    made = plan(seen, T0 + 16)
    assert (written(made), states(made)) == ([], {10: "Succeeded"})
    assert written(plan(after(seen, made, {}), T0 + 17)) == [], "though somebody has deleted it"


def test_a_job_without_the_field_has_no_jobs_and_no_looks() -> None:
    seen = training()
    seen = replace(seen, job=replace(seen.job, spec=jobs.spec(checkpoint={"uri": "s3://bucket/run"})))
    made = plan(seen, T0 + 13)
    assert (written(made), made.status.evaluation_jobs) == ([], ())


def test_while_jobs_run_only_the_newest_checkpoint_waits() -> None:
    seen = training()
    views: dict[str, EvaluationJobView] = {name(10): RUNNING}
    made = plan(seen, T0 + 13)
    for step in (20, 30):
        seen = saved(after(seen, made, views), step)
        made = plan(seen, T0 + 13 + step)
        assert written(made) == []
    assert states(made) == {10: "Running", 30: "Pending"}
    views = {name(10): FAILED}
    seen = after(seen, made, views)
    made = plan(seen, T0 + 60)
    assert states(made) == {10: "Failed", 30: "Pending"}
    assert written(made) == [CreateEvaluationJob(name(30), "s3://bucket/run/30", 30)]
    assert [(event.reason, FAILED.message in event.message) for event in made.events] == [("EvaluationJobFailed", True)]
    assert made.status.trouble is None, "training does not mind"


def test_as_many_ended_jobs_as_asked_are_kept_and_unlisted_ones_are_deleted() -> None:
    seen = training(keep=1, maxRunning=2)
    made = plan(seen, T0 + 13)
    views: dict[str, EvaluationJobView] = {name(10): SUCCEEDED}
    seen = saved(after(seen, made, views), 20)
    made = plan(seen, T0 + 23)
    views = {**views, name(20): RUNNING}
    seen = saved(after(seen, made, views), 30)
    made = plan(seen, T0 + 33)
    assert states(made) == {10: "Succeeded", 20: "Running", 30: "Pending"}
    assert written(made) == [CreateEvaluationJob(name(30), "s3://bucket/run/30", 30)], "two may run"
    views = {**views, name(20): SUCCEEDED, name(30): RUNNING}
    made = plan(after(seen, made, views), T0 + 43)
    assert states(made) == {20: "Succeeded", 30: "Running"}
    assert written(made) == [DeleteEvaluationJob(name(10))]


def test_a_job_that_was_deleted_while_it_ran_has_failed() -> None:
    seen = training()
    made = plan(seen, T0 + 13)
    made = plan(seen := after(seen, made, {name(10): RUNNING}), T0 + 14)
    made = plan(after(seen, made, {}), T0 + 24)
    assert states(made) == {10: "Failed"}
    assert written(made) == []


def test_the_last_checkpoint_gets_its_job_after_the_end_and_none_is_made_for_a_job_being_deleted() -> None:
    seen = training(100)
    coordinator = seen.agents["demo-0-0"]
    assert coordinator.report is not None
    ended = replace(coordinator, report=replace(coordinator.report, state=protocol.State.SUCCEEDED))
    seen = replace(seen, agents={**seen.agents, "demo-0-0": ended})
    made = plan(seen, T0 + 13)
    assert made.status.is_true("Complete")
    assert states(made) == {100: "Pending"}
    seen = after(seen, made, {})
    assert written(plan(seen, T0 + 14)) == [CreateEvaluationJob(name(100), "s3://bucket/run/100", 100)]
    assert written(plan(replace(seen, job=replace(seen.job, deleting=True)), T0 + 14)) == []


@pytest.mark.parametrize("known", [True, False])
def test_a_job_with_a_time_to_live_is_deleted_once_its_last_checkpoint_is_evaluated(known: bool) -> None:
    """The operator may have restarted just before the end, so that it does not know the Jobs yet."""
    seen = replace(training(100), evaluation_jobs={} if known else None)
    spec = seen.job.spec.model_copy(update={"ttl_seconds_after_finished": 0})
    report = jobs.coordinator_report(
        storage=protocol.Storage("Ready", protocol.Durable(jobs.UID, 1, 100, "s3://bucket/run/100", at=T0 + 12)),
        state=protocol.State.SUCCEEDED,
    )
    agent = replace(seen.agents["demo-0-0"], report=report)
    seen = replace(seen, job=replace(seen.job, spec=spec), agents={**seen.agents, "demo-0-0": agent})
    made = plan(seen, T0 + 13)
    looks: tuple[Mapping[str, EvaluationJobView] | None, ...] = (None, {}, {name(100): RUNNING})
    for views in looks:
        seen = replace(jobs.then(seen, made), evaluation_jobs=views)
        made = plan(seen, T0 + 14)
        assert DeleteJob() not in made.actions
    assert DeleteJob() in plan(after(seen, made, {name(100): SUCCEEDED}), T0 + 15).actions


def test_names_of_long_jobs_fit_into_a_label() -> None:
    from concertina.api.status import CheckpointMark
    from concertina.plan.lifecycle.evaluation_jobs import job_name

    mark = CheckpointMark(step=10**9, round=10**5, uri="s3://bucket/a", at="2027-01-15T08:00:00Z")
    view = jobs.job(jobs.spec())
    names = {job_name(replace(view, name=long), mark) for long in ("a" * 253, f"{'a' * 30}.{'b' * 99}", "c")}
    assert len(names) == 3
    assert all(len(found) <= 63 for found in names)
