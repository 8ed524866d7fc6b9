"""Jobs of `spec.evaluationJob`: one Kubernetes Job for each durable checkpoint, made from a PodTemplate.

The status lists each Job before the operator creates it, and the Job's name follows from the checkpoint. After a
restart, the operator therefore finds the Job by its name, and creates no second one. A Job that fails, or can't be
created, does not affect the training.

The number of Jobs is limited. If checkpoints arrive faster than Jobs end, only the newest waiting one gets a Job.
"""

from __future__ import annotations

from concertina.api.status import CheckpointMark, EvaluationJobMark, EvaluationJobState, JobStatus
from concertina.plan.actions import Action, CreateEvaluationJob, DeleteEvaluationJob, Event
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import EvaluationJobView, JobView

LOOK_SECONDS = 10.0
"""Seconds between two lists of the Jobs of a TrainingJob while some of them have not ended."""
LONGEST_NAME = 63
"""Maximum length of a Job's name, which becomes the value of a label of its pods."""
UNFINISHED = (EvaluationJobState.PENDING, EvaluationJobState.RUNNING)
DELETED = "the Job was deleted before its end"


def job_name(job: JobView, checkpoint: CheckpointMark) -> str:
    """Return the name of the Job that evaluates a checkpoint.

    The name contains a part of the TrainingJob's uid, because a TrainingJob of the same name may have existed before.
    """
    suffix = f"-{job.uid[:8]}-{checkpoint.round}-{checkpoint.step}"
    return job.name[: LONGEST_NAME - len(suffix)].rstrip("-.") + suffix


def marks(ctx: JobContext, newest: CheckpointMark | None) -> tuple[EvaluationJobMark, ...]:
    """Return the new value of `status.evaluationJobs`. `newest` is the newest durable checkpoint."""
    spec, jobs = ctx.spec.evaluation_job, ctx.observed.evaluation_jobs
    if spec is None:
        return ()
    if jobs is None:
        return ctx.status.evaluation_jobs
    current = [_seen(mark, jobs.get(mark.name)) for mark in ctx.status.evaluation_jobs]
    if newest is not None and all((mark.round, mark.step) < (newest.round, newest.step) for mark in current):
        current.append(
            EvaluationJobMark(
                name=job_name(ctx.observed.job, newest),
                step=newest.step,
                round=newest.round,
                uri=newest.uri,
                state=EvaluationJobState.PENDING,
            )
        )
    pending = [mark for mark in current if mark.state is EvaluationJobState.PENDING]
    running = [mark for mark in current if mark.state is EvaluationJobState.RUNNING]
    ended = [mark for mark in current if mark.state not in UNFINISHED]
    kept = [*pending[-max(1, spec.max_running - len(running)) :], *running, *ended[-spec.keep :]]
    return tuple(mark for mark in current if mark in kept)


def _seen(mark: EvaluationJobMark, view: EvaluationJobView | None) -> EvaluationJobMark:
    """Return an entry of `status.evaluationJobs`, updated with the last known state of the Job."""
    if mark.state not in UNFINISHED:
        return mark
    if view is None:
        gone = mark.state is EvaluationJobState.RUNNING
        return mark.model_copy(update={"state": EvaluationJobState.FAILED, "message": DELETED}) if gone else mark
    if view.state is mark.state:
        return mark
    return mark.model_copy(update={"state": view.state, "message": view.message[:1024]})


def actions(ctx: JobContext, status: JobStatus) -> tuple[Action, ...]:
    """Return the actions that create and delete Jobs of `spec.evaluationJob`.

    `status` is the status after this pass.
    """
    spec, jobs = ctx.spec.evaluation_job, ctx.observed.evaluation_jobs
    if spec is None or jobs is None or ctx.observed.job.deleting:
        return ()
    listed = status.evaluation_jobs
    free = spec.max_running - sum(mark.state is EvaluationJobState.RUNNING for mark in listed)
    pending = [mark for mark in listed if mark.state is EvaluationJobState.PENDING]
    names = {mark.name for mark in listed}
    return (
        *(CreateEvaluationJob(mark.name, mark.uri, mark.step) for mark in pending[: max(0, free)]),
        *(DeleteEvaluationJob(name) for name in jobs if name not in names),
    )


def seconds_left(ctx: JobContext, status: JobStatus) -> float | None:
    """Return the seconds until the operator lists the Jobs again; None if all Jobs have ended."""
    if ctx.spec.evaluation_job is None:
        return None
    unfinished = any(mark.state in UNFINISHED for mark in status.evaluation_jobs)
    return LOOK_SECONDS if unfinished or ctx.observed.evaluation_jobs is None else None


def may_be_unfinished(ctx: JobContext) -> bool:
    """Return whether a Job that evaluates a checkpoint may still run or may still have to be created."""
    if ctx.spec.evaluation_job is None:
        return False
    current = marks(ctx, ctx.status.last_checkpoint)
    return ctx.observed.evaluation_jobs is None or any(mark.state in UNFINISHED for mark in current)


def events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Return an event for each Job that has failed since the last pass."""
    before = {mark.name: mark.state for mark in old.evaluation_jobs}
    return tuple(
        Event(
            "Warning", "EvaluationJobFailed", f"Job {mark.name} for the checkpoint of step {mark.step}: {mark.message}"
        )
        for mark in new.evaluation_jobs
        if mark.state is EvaluationJobState.FAILED and before.get(mark.name) in UNFINISHED
    )
