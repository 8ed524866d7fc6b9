"""`concertina checkpoint create`: request a checkpoint with an annotation, and wait for the operator's answer."""

from __future__ import annotations

import asyncio

import typer

from concertina.api import CHECKPOINT_NOW
from concertina.kube.parse.views import checkpoint_asked
from concertina.kube.resources import TRAINING_JOBS, Raw
from concertina.terminal.checkpoint_request import ask_for_checkpoint
from concertina.terminal.cluster_connection import Target, UserError

LOOK_SECONDS = 0.5


async def ask(target: Target, job: str, wait: bool) -> None:
    """Request a checkpoint of a job. If `wait` is true, wait until the checkpoint is in storage.

    Raises:
        UserError: When the job can't make the checkpoint.
    """
    async with target.connect() as (client, namespace):
        request = await ask_for_checkpoint(client, namespace, job)
        typer.echo(f"A checkpoint of the next step of {job} is requested (request {request}).")
        while wait:
            if saved := _finished_message(await client.get(TRAINING_JOBS, namespace, job), request):
                typer.echo(f"{saved}.")
                return
            await asyncio.sleep(LOOK_SECONDS)


def _finished_message(job: Raw, request: str) -> str:
    """Return the operator's message about the checkpoint of this request; empty while the request is in progress.

    If there is a later request, the checkpoint of the later request is accepted too.

    Raises:
        UserError: When the operator refuses the request, or the annotation was removed.
    """
    current_request = checkpoint_asked(job)
    request_status = (job.get("status") or {}).get("checkpointRequest") or {}
    if request_status.get("id") in (request, current_request):
        if request_status.get("state") == "Done":
            return str(request_status.get("message", ""))
        if request_status.get("state") == "Refused":
            raise UserError(f"no checkpoint was made: {request_status['message']}.")
    if not current_request:
        raise UserError(
            f"the annotation {CHECKPOINT_NOW} was removed from the job before the checkpoint was made: request "
            "it again."
        )
    return ""
