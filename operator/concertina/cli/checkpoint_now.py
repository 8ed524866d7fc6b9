"""`concertina checkpoint now`: an annotation on the job, and what the operator says became of it."""

from __future__ import annotations

import asyncio
import secrets

import typer

from concertina.api import CHECKPOINT_NOW
from concertina.kube.resources import TRAINING_JOBS
from concertina.terminal.connection import Complaint, Target

LOOK_SECONDS = 0.5


async def ask(target: Target, job: str, wait: bool) -> None:
    """Raises Complaint where the job can't do it."""
    request = secrets.token_hex(8)
    async with target.connect() as (client, namespace):
        annotation = {"metadata": {"annotations": {CHECKPOINT_NOW: request}}}
        await client.patch(TRAINING_JOBS, namespace, job, annotation)
        typer.echo(f"{job} is asked for a checkpoint of its next step (request {request}).")
        while wait:
            status = (await client.get(TRAINING_JOBS, namespace, job)).get("status") or {}
            seen = status.get("checkpointRequest") or {}
            if seen.get("id") == request and seen["state"] == "Done":
                typer.echo(f"{seen['message']}.")
                return
            if seen.get("id") == request and seen["state"] == "Refused":
                raise Complaint(f"no checkpoint is made: {seen['message']}.")
            await asyncio.sleep(LOOK_SECONDS)
