"""`concertina checkpoint create`: an annotation on the job, and what the operator says became of it."""

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
    """Raises UserError where the job can't do it."""
    async with target.connect() as (client, namespace):
        request = await ask_for_checkpoint(client, namespace, job)
        typer.echo(f"{job} is asked for a checkpoint of its next step (request {request}).")
        while wait:
            if saved := _saved(await client.get(TRAINING_JOBS, namespace, job), request):
                typer.echo(f"{saved}.")
                return
            await asyncio.sleep(LOOK_SECONDS)


def _saved(job: Raw, request: str) -> str:
    """Where the checkpoint is; empty: not yet. Who asks later takes our place, and any later checkpoint is as good.
    Raises UserError where none is to be waited for."""
    asked = checkpoint_asked(job)
    seen = (job.get("status") or {}).get("checkpointRequest") or {}
    if seen.get("id") in (request, asked):
        if seen.get("state") == "Done":
            return str(seen.get("message", ""))
        if seen.get("state") == "Refused":
            raise UserError(f"no checkpoint is made: {seen['message']}.")
    if not asked:
        raise UserError(
            f"the annotation {CHECKPOINT_NOW} was taken off the job before its checkpoint was made: ask again."
        )
    return ""
