"""Request for a checkpoint, which is an annotation of the job. Each new value of the annotation is a new request."""

import secrets

from concertina.api import CHECKPOINT_NOW
from concertina.kube.client import Client
from concertina.kube.resources import TRAINING_JOBS


async def ask_for_checkpoint(client: Client, namespace: str, job: str) -> str:
    """Request a checkpoint of a job's next step, and return the identifier of the request.

    The job's status later contains this identifier.
    """
    request = secrets.token_hex(8)
    annotation = {"metadata": {"annotations": {CHECKPOINT_NOW: request}}}
    await client.patch(TRAINING_JOBS, namespace, job, annotation)
    return request
