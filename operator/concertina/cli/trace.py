"""`concertina trace`: trace a few steps of some ranks, with commands that run in the agents' pods.

`concertina status --members` gets reports in the same way. The operator is not involved (decision "concertina trace
fetches traces by exec").
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

import typer

from concertina.api import TRAINER
from concertina.api.status import JobStatus
from concertina.api.world import World
from concertina.cli.agent_report import agent_command, report_of
from concertina.kube.client import Client
from concertina.kube.errors import ApiError
from concertina.kube.execute import execute
from concertina.kube.parse.views import status_of
from concertina.kube.resources import PODS, TRAINING_JOBS, Raw
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.perfetto import RankTrace, merged
from concertina_protocol import ProtocolError
from concertina_protocol.step_traces import MOST_BYTES, MOST_STEPS

MOST_RANKS = 16
AHEAD_SECONDS = 3.0
"""Seconds between the first request and the first traced step.

All ranks trace the same steps, so the first of these steps must not begin before the last rank has received its
request.
"""
LONGEST_SECONDS = 600.0
_MOST_UNPACKED = 1 << 30


async def trace(target: Target, job: str, steps: int, ranks: str, out: str) -> None:
    rank_numbers = _ranks(ranks)
    if not 1 <= steps <= MOST_STEPS:
        raise UserError(f"--steps takes 1 to {MOST_STEPS}")
    async with target.connect() as (client, namespace):
        status = status_of(await client.get(TRAINING_JOBS, namespace, job))
        pods = await _pods(client, namespace, job, status.world, rank_numbers)
        first, step_seconds = await _first_step(client, namespace, status)
        limit = min(LONGEST_SECONDS, 45.0 + 3 * step_seconds * (steps + 1))
        typer.echo(
            f"{steps} steps of rank {', '.join(map(str, rank_numbers))} of {job}"
            + (f", from step {first}" if first else "")
        )
        traces = await asyncio.gather(
            *(_fetch(client, namespace, pods[rank], rank, first, steps, limit) for rank in rank_numbers)
        )
    path = Path(out or f"{job}-trace.json")
    size = _write(path, merged(traces))
    typer.echo(f"The trace is in {path} ({size / 1e6:.1f} MB). Open it at https://ui.perfetto.dev")


def _ranks(text: str) -> list[int]:
    """Return the ranks in a comma-separated list, sorted and without duplicates.

    Raises:
        UserError: When the list is invalid or too long.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 8 for word in words) or len(words) > MOST_RANKS:
        raise UserError(f"--ranks takes up to {MOST_RANKS} numbers, such as 0,3")
    return sorted({int(word) for word in words})


async def _pods(client: Client, namespace: str, job: str, world: World, ranks: list[int]) -> dict[int, Raw]:
    if not world.members:
        raise UserError(f"{job} does not train now; `concertina status {job}` says why.")
    pods = {}
    for rank in ranks:
        if not (replica := world.replica_of(rank)):
            raise UserError(f"{job} has ranks 0 to {world.workers - 1} now, and no rank {rank}.")
        pods[rank] = await client.get(PODS, namespace, replica)
    return pods


async def _first_step(client: Client, namespace: str, status: JobStatus) -> tuple[int, float]:
    """Return the first step to trace and the duration of a step in seconds, from the report of rank 0.

    If the duration is unknown, the step is 0, and the trace begins with the next step.
    """
    try:
        coordinator = await client.get(PODS, namespace, status.world.coordinator or "")
        report = await report_of(client, namespace, coordinator)
    except (ApiError, ProtocolError):
        report = None
    progress = report.progress if report else None
    if progress is None or not progress.step_seconds or not math.isfinite(progress.step_seconds):
        return 0, 0.0
    return progress.step + math.ceil(AHEAD_SECONDS / progress.step_seconds) + 1, progress.step_seconds


async def _fetch(
    client: Client, namespace: str, pod: Raw, rank: int, first: int, steps: int, seconds: float
) -> RankTrace:
    name = pod["metadata"]["name"]
    command = [
        *agent_command(pod), "trace", "--rank", str(rank), "--steps", str(steps), "--first-step", str(first),
        "--seconds", f"{seconds:g}",
    ]  # fmt: skip
    text = await execute(client, namespace, name, TRAINER, command, seconds + 30.0, 2 * MOST_BYTES)
    try:
        content = json.loads(_unpacked(base64.b64decode(text)))
        return RankTrace(rank, name, dict(content["trace"]), dict(content["flightRecorder"]))
    except (ValueError, KeyError, TypeError, binascii.Error, zlib.error) as error:
        raise UserError(f"the file that {name} sent is not a trace: {error}") from error


def _unpacked(data: bytes) -> bytes:
    decompressor = zlib.decompressobj(wbits=31)
    content = decompressor.decompress(data, _MOST_UNPACKED)
    if not decompressor.eof:
        raise ValueError("it is cut off, or too long")
    return content


def _write(path: Path, trace: dict[str, Any]) -> int:
    """Write the trace as JSON, and return the size of the file in bytes.

    A file with the suffix .gz is compressed.

    Raises:
        UserError: When the file can't be written.
    """
    content = json.dumps(trace).encode()
    try:
        return path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error
