"""What a diagnosis goes by, gathered from a cluster or read from a file."""

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
"""At the agents: memory that rises from each to the next is hardly noise."""
MOST_PODS = 16
"""That are asked, the coordinator first: a problem of one of a thousand is named in the status."""
LATE_SECONDS = 60.0
"""That the operator's next word is waited for: with a thousand jobs it comes every 50 s."""
LOG_LINES, LOG_BYTES = 2000, 8 << 20
LARGEST_FILE = 16 << 20

# In the container, which knows the port and the token; no network policy need let the caller in (decision "Agents are
# asked from within").
_ASK = """
import json, os, urllib.request
said = json.loads(os.environ.get("CONCERTINA_METRICS") or "{}")
host, token = os.environ["CONCERTINA_POD_IP"], os.environ.get("CONCERTINA_METRICS_TOKEN")
if said.get("port"):
    host = f"[{host}]" if ":" in host else host
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{host}:{said['port']}/metrics", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    print(opener.open(request, timeout=5).read(1 << 20).decode())
"""


class EvidenceRecord(StatusModel):
    """All that was seen of a job, as `concertina diagnose --json` writes it and reads it again."""

    job: dict[str, Any]
    """The object, with its status."""
    at: float
    """Unix seconds: when it was read."""
    live: bool = False
    earlier: dict[str, Any] | None = None
    """The object some seconds before."""
    agents: tuple[AgentFigures, ...] = ()
    steps: tuple[StepLine, ...] = ()
    unseen: tuple[str, ...] = ()
    """Sentences: what could not be asked, and why."""

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
            status=self.status,
            at=self.at,
            created=unix_seconds(created) if isinstance(created, str) else self.at,
            live=self.live,
            earlier=status_of(self.earlier) if self.earlier else None,
            agents=self.agents,
            steps=self.steps,
        )


# --- from a cluster ---------------------------------------------------------------------------------------------------


async def look(client: Client, namespace: str, name: str, seconds: float) -> EvidenceRecord:
    """Two readings of the status, so many seconds apart by the operator's own clock, where the job is not over."""
    earlier = await client.get(TRAINING_JOBS, namespace, name)
    if not earlier.get("status") or _over(earlier):
        steps, why = await _steps(client, namespace, status_of(earlier))
        return EvidenceRecord(job=earlier, at=time.time(), live=True, steps=steps, unseen=why)
    asked, unseen = await _to_ask(client, namespace, name, status_of(earlier).world.coordinator)
    figures: list[AgentFigures] = []
    silent: dict[str, str] = {}
    for number in range(LOOKS):
        if number:
            await asyncio.sleep(seconds / (LOOKS - 1))
        answers = await asyncio.gather(*(_ask(client, namespace, pod) for pod in asked))
        figures += [answer for answer in answers if isinstance(answer, AgentFigures)]
        silent |= {
            why: pod["metadata"]["name"] for pod, why in zip(asked, answers, strict=True) if isinstance(why, str)
        }
    unseen += [f"{pod} (or more pods) told no metrics: {why}" for why, pod in silent.items()]
    job = await _later(client, namespace, name, earlier, seconds)
    steps, why = await _steps(client, namespace, status_of(job))
    return EvidenceRecord(
        job=job, at=time.time(), live=True, earlier=earlier, agents=tuple(figures), steps=steps, unseen=(*unseen, *why)
    )


async def _later(client: Client, namespace: str, name: str, earlier: Raw, seconds: float) -> Raw:
    """The job as soon as its time was counted so many seconds further, or as it is after LATE_SECONDS."""
    give_up = time.monotonic() + LATE_SECONDS
    while True:
        job = await client.get(TRAINING_JOBS, namespace, name)
        before, now = status_of(earlier).goodput.at, status_of(job).goodput.at
        counted = unix_seconds(now) - unix_seconds(before) if before and now else 0.0
        if counted >= seconds or _over(job) or time.monotonic() > give_up:
            return job
        await asyncio.sleep(1.0)


def _over(job: Raw) -> bool:
    """Nothing more happens to it: one look is enough."""
    status = status_of(job)
    return ended(status) is not None or word(status) == "Suspended"


async def _to_ask(client: Client, namespace: str, name: str, coordinator: str | None) -> tuple[list[Raw], list[str]]:
    """Pods, and what stands in the way of asking more of them."""
    try:
        pods, _ = await client.list_all(PODS, namespace, f"{JOB}={name}")
    except ApiError as error:
        return [], [f"the job's pods could not be listed: {error}"]
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    running.sort(key=lambda pod: (pod["metadata"]["name"] != coordinator, pod["metadata"]["name"]))
    left_out = len(running) - MOST_PODS
    return running[:MOST_PODS], [f"{left_out} more pods were not asked"] if left_out > 0 else []


async def _ask(client: Client, namespace: str, pod: Raw) -> AgentFigures | str:
    """What its agent's metrics say, or why that is not known."""
    name = pod["metadata"]["name"]
    try:
        python, _ = agent_command(pod)
        text = await execute(client, namespace, name, TRAINER, [python, "-c", _ASK], seconds=15.0)
        return agents.figures(name, time.time(), text) if text else "the operator was installed without"
    except (ApiError, ValueError, UserError) as error:
        return str(error)[-300:]


Steps = tuple[tuple[StepLine, ...], tuple[str, ...]]
"""Lines, and what could not be read."""


async def _steps(client: Client, namespace: str, status: JobStatus) -> Steps:
    """The last ones in the coordinator's log."""
    pod, found = status.world.coordinator, []
    if not pod:
        return (), ()
    try:
        async for text in client.logs(namespace, pod, TRAINER, tail=LOG_LINES, limit_bytes=LOG_BYTES):
            if isinstance(line := log_lines.parse(text), StepDoneLine):
                loss = line.loss if math.isfinite(line.loss) else None
                found.append(StepLine(step=line.step, loss=loss, seconds=line.seconds))
    except ApiError as error:
        return (), (f"the log of {pod} could not be read: {error}",)
    return tuple(found), ()


# --- from a file ------------------------------------------------------------------------------------------------------


def read(file: Path) -> EvidenceRecord:
    """A TrainingJob with its status, as `kubectl get tj NAME -o yaml` has it, or what `--json` wrote. Raises
    UserError."""
    source = "standard input" if str(file) == "-" else str(file)
    try:
        text = (sys.stdin if str(file) == "-" else file.open()).read(LARGEST_FILE)
        found: Any = yaml.safe_load(text) if not text.lstrip().startswith("{") else json.loads(text)
    except OSError as error:
        raise UserError(f"{source} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source} is neither YAML nor JSON: {error}") from error
    no_job = f"{source} holds no {KIND}: save one by `kubectl get tj NAME -o yaml`, or by `concertina diagnose --json`"
    if isinstance(found, dict) and isinstance(found.get("record"), dict):
        try:
            record = EvidenceRecord.model_validate(found["record"]).model_copy(update={"live": False})
        except ValidationError as error:
            raise UserError(f"{source} is no output of `concertina diagnose --json`: {error}") from error
        if not _has_parts(record.job) or not _has_parts(record.earlier or {}):
            raise UserError(no_job)
        return record
    if not isinstance(found, dict) or found.get("kind") != KIND or "metadata" not in found or not _has_parts(found):
        raise UserError(no_job)
    status = status_of(found)
    try:
        marks = [unix_seconds(mark) for mark in (status.goodput.at, status.completion_time) if mark]
    except ValueError as error:
        raise UserError(f"{source} has a time that can't be read: {error}") from error
    return EvidenceRecord(job=found, at=max(marks, default=time.time()))


def _has_parts(job: Raw) -> bool:
    """Those that are read without asking what they are: the API server lets nothing else be there."""
    return all(isinstance(job.get(part) or {}, dict) for part in ("metadata", "status"))
