"""Reads of the Kubernetes resource claims that give GPUs to a job's workers (`api/claims.py`)."""

from __future__ import annotations

import dataclasses

from concertina.api.claims import SET_A_NUMBER, GpusUnknown, gpus_of, trainer_claims, with_gpus
from concertina.controller.cache.job import CachedJob
from concertina.kube.client import Client
from concertina.kube.errors import Forbidden, NotFound
from concertina.kube.resources import RESOURCE_CLAIM_TEMPLATES, RESOURCE_CLAIMS
from concertina.plan.observed import JobView
from concertina_protocol.log import log_event


def unread(view: JobView) -> bool:
    """Return whether the job's number of workers depends on resource claims that the operator has not read yet."""
    return view.spec is not None and not view.claims_error and bool(trainer_claims(view.spec))


async def count_gpus(client: Client, job: CachedJob) -> None:
    """Read the job's resource claims, and set the number of workers per replica for `workersPerReplica: Auto`.

    If the claims can't be read, the function records the reason instead, and each planning pass reads the claims again.
    A job that has a round then keeps the number of workers of that round. After a success, the claims are read again
    only when the job's spec changes.

    Raises:
        ApiError: When the API server is unreachable.
    """
    view = job.view
    claims = trainer_claims(view.spec) if view.spec is not None else ()
    if view.spec is None or not claims:
        return
    claimed, error = 0, ""
    for claim in claims:
        resource = RESOURCE_CLAIM_TEMPLATES if claim.from_template else RESOURCE_CLAIMS
        try:
            claimed += gpus_of(claim, await client.get(resource, view.namespace, claim.object_name))
        except GpusUnknown as unknown:
            error = str(unknown)
        except NotFound:
            error = f"claim {claim.name} names {claim.object_name}, which does not exist: create it, or {SET_A_NUMBER}"
        except Forbidden as forbidden:
            error = f"the operator may not read claim {claim.name} ({forbidden.message}): {SET_A_NUMBER}"
    if job.view.generation != view.generation:  # the spec has changed meanwhile: the next pass reads its claims
        return
    spec, world = view.spec if error else with_gpus(view.spec, claimed), view.status.world
    if error and world.members:
        error, spec = "", spec.model_copy(update={"workers_per_replica": world.workers // len(world.members)})
    job.view = dataclasses.replace(job.view, spec=spec, claims_error=error)
    log_event("claims read", **job.named(), gpus=claimed, error=error)
