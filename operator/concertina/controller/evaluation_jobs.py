"""Reads and writes of the Kubernetes Jobs that evaluate checkpoints (`spec.evaluationJob`).

An error here must not affect the training. The operator stores an error of the API server as the Job's result, or
repeats the request. A TrainingJob without `spec.evaluationJob` causes no requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from concertina.api.status import EvaluationJobState
from concertina.controller.cache.job import CachedJob
from concertina.controller.status_patches import PreconditionFailed
from concertina.kube.client import Client
from concertina.kube.errors import AlreadyExists, ApiError, Forbidden, Invalid, NotFound, Unreachable
from concertina.kube.manifests.evaluation_job import evaluation_job_manifest
from concertina.kube.manifests.names import JOB_UID
from concertina.kube.parse.evaluation_jobs import evaluation_job_view
from concertina.kube.resources import JOBS, POD_TEMPLATES, Raw
from concertina.plan.actions import CreateEvaluationJob, DeleteEvaluationJob
from concertina.plan.lifecycle.evaluation_jobs import LOOK_SECONDS, UNFINISHED
from concertina.plan.observed import EvaluationJobView
from concertina_protocol.log import log_event


def look_if_due(client: Client, job: CachedJob, changed: Callable[[str], None]) -> None:
    """List the Jobs of a TrainingJob with `spec.evaluationJob` in the background, if the last list is too old.

    After the first list, Jobs are listed only while some of them have not ended. No planning pass waits for the
    response, because a slow API server must not delay a recovery. `changed` is called with the uid of the TrainingJob
    if a Job has changed.
    """
    view, now = job.view, time.monotonic()
    if view.spec is None or view.spec.evaluation_job is None or job.evaluation_look is not None:
        return
    unfinished = any(mark.state in UNFINISHED for mark in view.status.evaluation_jobs)
    if job.evaluation_jobs is not None and not unfinished:
        return
    if job.evaluation_looked_at is not None and now - job.evaluation_looked_at < LOOK_SECONDS:
        return
    job.evaluation_looked_at = now
    job.evaluation_look = asyncio.create_task(_look(client, job, changed))


async def _look(client: Client, job: CachedJob, changed: Callable[[str], None]) -> None:
    before = job.evaluation_jobs
    try:
        items, _ = await client.list_all(JOBS, job.view.namespace, labels=f"{JOB_UID}={job.view.uid}")
        # The list may be older than a Job that was created meanwhile.
        newer = {name: view for name, view in (job.evaluation_jobs or {}).items() if name not in (before or {})}
        own = (item for item in items if _is_of(job, item))
        job.evaluation_jobs = newer | {item["metadata"]["name"]: evaluation_job_view(item) for item in own}
    except ApiError as error:
        log_event("evaluation jobs unknown", **job.named(), message=error.message)
        if isinstance(error, Forbidden):  # then it may not create one either, and the write says so
            job.evaluation_jobs = job.evaluation_jobs or {}
    finally:
        job.evaluation_look = None
    if job.evaluation_jobs != before:
        changed(job.view.uid)


async def create(client: Client, job: CachedJob, action: CreateEvaluationJob) -> None:
    """Create a Job that evaluates a checkpoint. If the Job can never be created, store the error as the Job's result.

    Raises:
        PreconditionFailed: When the TrainingJob no longer has `spec.evaluationJob`.
        Unreachable: When the API server does not respond.
    """
    view = job.view
    if view.spec is None or view.spec.evaluation_job is None:
        raise PreconditionFailed("the job no longer has spec.evaluationJob")
    spec = view.spec.evaluation_job
    try:
        template = await client.get(POD_TEMPLATES, view.namespace, spec.pod_template)
        manifest = evaluation_job_manifest(view, spec, template, action)
        try:
            stored = await client.create(JOBS, view.namespace, manifest, strict=True)
            log_event("evaluation job created", **job.named(), name=action.name, step=action.step)
        except AlreadyExists:  # an earlier response was lost, or another operator created it
            stored = await client.get(JOBS, view.namespace, action.name)
        result = (
            evaluation_job_view(stored) if _is_of(job, stored) else _failed(f"another Job has the name {action.name}")
        )
    except NotFound as error:
        result = _failed(f"{error.message}: create the PodTemplate {spec.pod_template} in this namespace")
    except Invalid as error:
        result = _failed(f"the API server refused the Job: {error.message}")
    except Unreachable:
        raise
    except ApiError as error:  # for example a quota, or roles that the API server does not know yet
        log_event("evaluation job refused", **job.named(), name=action.name, message=error.message)
        return  # it remains pending, so a later pass tries again
    job.evaluation_jobs = {**(job.evaluation_jobs or {}), action.name: result}


def _is_of(job: CachedJob, item: Raw) -> bool:
    """Return whether a Job belongs to this TrainingJob, by owner reference. A user may copy a label."""
    return any(owner.get("uid") == job.view.uid for owner in item["metadata"].get("ownerReferences") or ())


def _failed(message: str) -> EvaluationJobView:
    return EvaluationJobView(EvaluationJobState.FAILED, message)


async def delete(client: Client, job: CachedJob, action: DeleteEvaluationJob) -> None:
    """Delete a Job of `spec.evaluationJob` with its pods.

    Raises:
        Unreachable: When the API server does not respond.
    """
    try:
        stored = await client.get(JOBS, job.view.namespace, action.name)
        if _is_of(job, stored):
            await client.delete(
                JOBS, job.view.namespace, action.name, uid=stored["metadata"]["uid"], propagation="Background"
            )
    except Unreachable:
        raise
    except ApiError as error:  # it is deleted with the TrainingJob
        log_event("evaluation job not deleted", **job.named(), name=action.name, message=error.message)
    job.evaluation_jobs = {name: view for name, view in (job.evaluation_jobs or {}).items() if name != action.name}
