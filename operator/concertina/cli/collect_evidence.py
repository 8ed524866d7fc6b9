"""Evidence for a diagnosis: collected from a cluster, or read from a file."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from concertina.api import KIND, TRAINER
from concertina.api.model import StatusModel
from concertina.api.parse import SpecError, parse_stored
from concertina.api.status import JobStatus, unix_seconds
from concertina.cli.agent_report import agent_command
from concertina.diagnosis import agents
from concertina.diagnosis.evidence import AgentFigures, JobEvidence, StepLine
from concertina.kube.client import Client
from concertina.kube.errors import ApiError
from concertina.kube.execute import execute
from concertina.kube.manifests.names import JOB
from concertina.kube.parse.views import status_of
from concertina.kube.resources import PODS, TRAINING_JOBS, Raw
from concertina.terminal.cluster_connection import UserError
from concertina.terminal.show import ended, word
from concertina_protocol import log_lines
from concertina_protocol.log_lines import StepDoneLine

LOOKS = 5
"""Number of times that the agents' metrics are read.

Memory that grows from each reading to the next is not likely to be noise.
"""
MOST_PODS = 16
"""Largest number of pods whose metrics are read. The coordinator's pod is the first.

If one of a thousand replicas has a problem, the job's status names that replica.
"""
LATE_SECONDS = 60.0
"""Longest time in seconds to wait for the operator's next status update. With a thousand jobs, it takes up to 50 s."""
LOG_LINES, LOG_BYTES = 2000, 8 << 20
LARGEST_FILE = 16 << 20

# Runs in the container, which has the port and the token. No network policy needs to admit the caller (decision "Agent
# data is read by a command in the container").
_ASK = """
import json, os, urllib.request
settings = json.loads(os.environ.get("CONCERTINA_METRICS") or "{}")
host, token = os.environ["CONCERTINA_POD_IP"], os.environ.get("CONCERTINA_METRICS_TOKEN")
if settings.get("port"):
    host = f"[{host}]" if ":" in host else host
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{host}:{settings['port']}/metrics", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    print(opener.open(request, timeout=5).read(1 << 20).decode())
"""


class EvidenceRecord(StatusModel):
    """Record of all observations that a diagnosis of one job uses.

    `concertina diagnose --json` writes them and can read them again.
    """

    job: dict[str, Any]
    """Manifest of the TrainingJob with its status."""
    at: float
    """Time at which the job was read, in Unix seconds."""
    live: bool = False
    earlier: dict[str, Any] | None = None
    """Manifest of the TrainingJob some seconds earlier; None if the job was read once."""
    agents: tuple[AgentFigures, ...] = ()
    steps: tuple[StepLine, ...] = ()
    unseen: tuple[str, ...] = ()
    """Sentences about data that could not be read, with the reasons."""

    @property
    def name(self) -> str:
        meta = self.job.get("metadata") or {}
        return f"{meta.get('namespace', 'default')}/{meta.get('name', '')}"

    @property
    def status(self) -> JobStatus:
        return status_of(self.job)

    def evidence(self) -> JobEvidence:
        try:
            spec = parse_stored(self.job)[0]
        except SpecError:
            spec = None
        created = (self.job.get("metadata") or {}).get("creationTimestamp")
        return JobEvidence(
            spec=spec,
            status=self.status.counted_until(self.at) if self.live else self.status,
            at=self.at,
            created=unix_seconds(created) if isinstance(created, str) else self.at,
            live=self.live,
            earlier=status_of(self.earlier) if self.earlier else None,
            agents=self.agents,
            steps=self.steps,
        )


# --- from a cluster ---------------------------------------------------------------------------------------------------


async def look(client: Client, namespace: str, name: str, seconds: float) -> EvidenceRecord:
    """Read a job's status twice, and its agents' metrics in between.

    The two readings are `seconds` apart by the operator's clock. A job that has ended, is suspended or has no status is
    read only once.
    """
    earlier = await client.get(TRAINING_JOBS, namespace, name)
    if not earlier.get("status") or _is_over(earlier):
        steps, unread = await _steps(client, namespace, status_of(earlier))
        return EvidenceRecord(job=earlier, at=time.time(), live=True, steps=steps, unseen=unread)
    pods, unseen = await _pods_to_read(client, namespace, name, status_of(earlier).world.coordinator)
    figures: list[AgentFigures] = []
    silent: dict[str, str] = {}
    for reading in range(LOOKS):
        if reading:
            await asyncio.sleep(seconds / (LOOKS - 1))
        answers = await asyncio.gather(*(_read_figures(client, namespace, pod) for pod in pods))
        figures += [answer for answer in answers if isinstance(answer, AgentFigures)]
        silent |= {
            answer: pod["metadata"]["name"]
            for pod, answer in zip(pods, answers, strict=True)
            if isinstance(answer, str)
        }
    unseen += [f"{pod} (or more pods) sent no metrics: {reason}" for reason, pod in silent.items()]
    job = await _job_after(client, namespace, name, earlier, seconds)
    steps, unread = await _steps(client, namespace, status_of(job))
    return EvidenceRecord(
        job=job,
        at=time.time(),
        live=True,
        earlier=earlier,
        agents=tuple(figures),
        steps=steps,
        unseen=(*unseen, *unread),
    )


async def _job_after(client: Client, namespace: str, name: str, earlier: Raw, seconds: float) -> Raw:
    """Return the job's manifest once the operator has added at least `seconds` to the job's time in the status.

    If the job ends first, or if LATE_SECONDS have passed, return the manifest as it is then. While a job does not
    train, the operator updates the job's time only when something changes. The manifest of such a job is therefore
    returned at once.
    """
    deadline = time.monotonic() + (LATE_SECONDS if word(status_of(earlier)) == "Training" else 0.0)
    while True:
        job = await client.get(TRAINING_JOBS, namespace, name)
        before, now = status_of(earlier).goodput.at, status_of(job).goodput.at
        counted = unix_seconds(now) - unix_seconds(before) if before and now else 0.0
        if counted >= seconds or _is_over(job) or time.monotonic() > deadline:
            return job
        await asyncio.sleep(1.0)


def _is_over(job: Raw) -> bool:
    """Return whether the job has ended, is suspended or is queued.

    One reading of such a job is enough, because its status does not change.
    """
    status = status_of(job)
    return ended(status) is not None or word(status) in ("Suspended", "Queued")


async def _pods_to_read(
    client: Client, namespace: str, name: str, coordinator: str | None
) -> tuple[list[Raw], list[str]]:
    """Return the running pods whose metrics are to be read, and a sentence about each pod that is left out."""
    try:
        pods, _ = await client.list_all(PODS, namespace, f"{JOB}={name}")
    except ApiError as error:
        return [], [f"the job's pods could not be listed: {error}"]
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    running.sort(key=lambda pod: (pod["metadata"]["name"] != coordinator, pod["metadata"]["name"]))
    left_out = len(running) - MOST_PODS
    return running[:MOST_PODS], [f"{left_out} more pods were not asked"] if left_out > 0 else []


async def _read_figures(client: Client, namespace: str, pod: Raw) -> AgentFigures | str:
    """Return the metrics of the pod's agent, or a sentence with the reason why they could not be read."""
    name = pod["metadata"]["name"]
    try:
        python, _ = agent_command(pod)
        text = await execute(client, namespace, name, TRAINER, [python, "-c", _ASK], seconds=15.0)
        return agents.figures(name, time.time(), text) if text else "the operator was installed without"
    except (ApiError, ValueError, UserError) as error:
        return str(error)[-300:]


Steps = tuple[tuple[StepLine, ...], tuple[str, ...]]
"""Logged steps, and sentences about what could not be read."""


async def _steps(client: Client, namespace: str, status: JobStatus) -> Steps:
    """Return the last training steps in the log of the coordinator's pod (the pod of rank 0)."""
    pod, steps = status.world.coordinator, []
    if not pod:
        return (), ()
    try:
        async for text in client.logs(namespace, pod, TRAINER, tail=LOG_LINES, limit_bytes=LOG_BYTES):
            if isinstance(line := log_lines.parse(text), StepDoneLine):
                loss = line.loss if math.isfinite(line.loss) else None
                steps.append(StepLine(step=line.step, loss=loss, seconds=line.seconds))
    except ApiError as error:
        return (), (f"the log of {pod} could not be read: {error}",)
    return tuple(steps), ()


# --- from a file ------------------------------------------------------------------------------------------------------


def read(file: Path) -> EvidenceRecord:
    """Read a job from a file.

    The file is the output of `kubectl get tj NAME -o yaml` or of `concertina diagnose --json`.

    Raises:
        UserError: When the file can't be read or does not contain a TrainingJob.
    """
    source = "standard input" if str(file) == "-" else str(file)
    try:
        text = (sys.stdin if str(file) == "-" else file.open()).read(LARGEST_FILE)
        content: Any = yaml.safe_load(text) if not text.lstrip().startswith("{") else json.loads(text)
    except OSError as error:
        raise UserError(f"{source} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source} is neither YAML nor JSON: {error}") from error
    no_job = f"{source} holds no {KIND}: save one by `kubectl get tj NAME -o yaml`, or by `concertina diagnose --json`"
    if isinstance(content, dict) and isinstance(content.get("record"), dict):
        try:
            record = EvidenceRecord.model_validate(content["record"]).model_copy(update={"live": False})
        except ValidationError as error:
            raise UserError(f"{source} is not output of `concertina diagnose --json`: {error}") from error
        if not _has_parts(record.job) or not _has_parts(record.earlier or {}):
            raise UserError(no_job)
        return record
    if (
        not isinstance(content, dict)
        or content.get("kind") != KIND
        or "metadata" not in content
        or not _has_parts(content)
    ):
        raise UserError(no_job)
    status = status_of(content)
    try:
        timestamps = [unix_seconds(timestamp) for timestamp in (status.goodput.at, status.completion_time) if timestamp]
    except ValueError as error:
        raise UserError(f"{source} has a time that can't be read: {error}") from error
    return EvidenceRecord(job=content, at=max(timestamps, default=time.time()))


def _has_parts(job: Raw) -> bool:
    """Return whether `metadata` and `status` of a manifest are objects, if they are present.

    The API server guarantees this, and the code that reads jobs relies on it. A file may contain anything.
    """
    return all(isinstance(job.get(part) or {}, dict) for part in ("metadata", "status"))
