"""Request for a checkpoint: an annotation of the job, of which the operator takes each new value for a request."""

import secrets

from concertina.api import CHECKPOINT_NOW
from concertina.kube.client import Client
from concertina.kube.resources import TRAINING_JOBS


async def ask_for_checkpoint(client: Client, namespace: str, job: str) -> str:
    """Ask a job for a checkpoint of its next step.

    Returns:
        The request, as the job's status will name it.
    """
    request = secrets.token_hex(8)
    annotation = {"metadata": {"annotations": {CHECKPOINT_NOW: request}}}
    await client.patch(TRAINING_JOBS, namespace, job, annotation)
    return request
