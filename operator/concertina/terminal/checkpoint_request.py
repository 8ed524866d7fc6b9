"""Asking a job for a checkpoint: the annotation whose new value the operator takes for a request."""

import secrets

from concertina.api import CHECKPOINT_NOW
from concertina.kube.client import Client
from concertina.kube.resources import TRAINING_JOBS


async def ask_for_checkpoint(client: Client, namespace: str, job: str) -> str:
    """Of its next step; the request, as the status will name it."""
    request = secrets.token_hex(8)
    annotation = {"metadata": {"annotations": {CHECKPOINT_NOW: request}}}
    await client.patch(TRAINING_JOBS, namespace, job, annotation)
    return request
