"""Display of one job until its end: a live view on a terminal, otherwise one printed line per change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from rich.console import Console
from rich.live import Live

from concertina import backoff
from concertina.api.status import ConditionType
from concertina.kube.client import Client, once_reachable
from concertina.kube.errors import Forbidden, Gone, NotFound, Unreachable
from concertina.kube.parse.views import status_of
from concertina.kube.resources import EVENTS, TRAINING_JOBS, Raw
from concertina.terminal import show

EVENTS_EVERY = 5.0
"""Minimum number of seconds between two reads of the job's events.

The job's object is watched, so changes of the object are seen sooner.
"""
FIRST_SECONDS, LONGEST_SECONDS = 0.2, 3.0
"""First and longest delay, in seconds, before a failed watch is reopened."""


async def states(client: Client, namespace: str, name: str) -> AsyncIterator[Raw]:
    """Yield the job's current object, and the new object after each change, until the job is deleted.

    During an outage of the API server, the generator waits.
    """
    failures = 0
    while True:
        try:
            job = await once_reachable(f"{namespace}/{name}", lambda: client.get(TRAINING_JOBS, namespace, name))
        except NotFound:
            return
        yield job
        try:
            version = job["metadata"]["resourceVersion"]
            async for event, changed in client.watch(TRAINING_JOBS, namespace, version, fields=f"metadata.name={name}"):
                failures = 0
                if event == "DELETED":
                    return
                if event != "BOOKMARK":
                    yield changed
        except Gone:
            continue
        except Unreachable:
            await asyncio.sleep(backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS))
            failures += 1


async def events_of(client: Client, job: Raw) -> list[Raw]:
    """Return the events about the job, or an empty list if they can't be read."""
    namespace, uid = job["metadata"]["namespace"], job["metadata"]["uid"]
    try:
        return (await client.list_all(EVENTS, namespace, fields=f"involvedObject.uid={uid}"))[0]
    except (Forbidden, Unreachable):
        return []


async def follow_job(client: Client, namespace: str, name: str, console: Console) -> int:
    """Show a job until its end, and return the exit status: 0 if it completes, 1 if it fails or is deleted.

    Raises:
        NotFound: When the job does not exist at the start.
        asyncio.CancelledError: When the user presses Ctrl-C.
    """
    # A job that never existed is an error, in contrast to a job that is deleted later.
    await client.get(TRAINING_JOBS, namespace, name)
    try:
        jobs = states(client, namespace, name)
        code = await (_live(jobs, console, client) if console.is_terminal else _lines(jobs, console))
    except asyncio.CancelledError:  # Ctrl-C
        console.print(
            f"The job continues; `concertina status -f {name}` follows it, `concertina suspend {name}` stops it"
        )
        raise
    if code is None:
        console.print(f"{namespace}/{name} was deleted.")
    return 1 if code is None else code


def _exit_code(job: Raw) -> int | None:
    end = show.ended(status_of(job))
    return None if end is None else int(end.type != "Complete")


async def _live(jobs: AsyncIterator[Raw], console: Console, client: Client) -> int | None:
    events, read_at = list[Raw](), -EVENTS_EVERY
    console.soft_wrap = False  # Live crops lines that don't fit into the window.
    with Live(console=console, auto_refresh=False) as live:
        async for job in jobs:
            if time.monotonic() - read_at >= EVENTS_EVERY:
                events, read_at = await events_of(client, job), time.monotonic()
            live.update(show.detail(job, events), refresh=True)
            if (code := _exit_code(job)) is not None:
                return code
    return None


async def _lines(jobs: AsyncIterator[Raw], console: Console) -> int | None:
    printed_key = ""
    async for job in jobs:
        status = status_of(job)
        ready, progress = status.condition(ConditionType.READY), status.progress
        line = f"{show.word(status)} {status.world.size} {ready.message if ready else ''}".strip()
        # During normal training, one line per percent is enough.
        percent = f" ({int(progress.percent)}%)" if progress and progress.percent is not None else ""
        key = f"{line}{percent}"
        if key != printed_key:
            loss = f" loss {progress.loss:.4g}" if progress and progress.loss is not None else ""
            step = f" step {progress.step}{percent}" if progress else ""
            console.print(f"{line}{step}{loss}", soft_wrap=True)
            printed_key = key
        if (code := _exit_code(job)) is not None:
            return code
    return None
