"""Commands for jobs. Each command sends requests to the API server, or follows a job."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import yaml

from concertina.amounts import amount
from concertina.api import API_VERSION, KIND
from concertina.api.spec import template_outdated
from concertina.cli.agent_report import report_of
from concertina.cli.dry_run import try_pod
from concertina.kube.errors import ApiError
from concertina.kube.manifests.names import JOB
from concertina.kube.parse.views import status_of
from concertina.kube.resources import PODS, TRAINING_JOBS, Raw
from concertina.terminal import show
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.console import plain
from concertina.terminal.follow import events_of, follow_job
from concertina_protocol import ProtocolError

console = plain()


def read_manifest(file: Path) -> Raw:
    """Return the manifest of the TrainingJob in a file.

    Raises:
        UserError: When the file can't be read, or does not contain exactly one TrainingJob with a name.
    """
    source = "standard input" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        documents: list[Any] = [document for document in yaml.safe_load_all(text) if document]
    except OSError as error:
        raise UserError(f"{source} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # invalid bytes, invalid dates, or deep nesting
        raise UserError(f"{source} is not YAML: {error}") from error
    kinds = [document.get("kind") if isinstance(document, dict) else None for document in documents]
    if kinds != [KIND]:
        kind_names = ", ".join(str(kind) for kind in kinds)[:400] or "nothing"
        raise UserError(f"{source} must hold one {KIND}, and it holds {kind_names}; apply other objects with kubectl")
    job: Raw = documents[0]
    if job.get("apiVersion") != API_VERSION:
        raise UserError(f"{source} has apiVersion {job.get('apiVersion')!s:.80}; this concertina knows {API_VERSION}")
    if not isinstance(job.get("metadata"), dict) or not job["metadata"].get("name"):
        raise UserError(f"{source} has no metadata.name: give the job a name")
    return job


async def run(target: Target, file: Path, detach: bool) -> int:
    job = read_manifest(file)
    async with target.connect() as (client, namespace):
        namespace = target.namespace or job["metadata"].get("namespace") or namespace
        name = job["metadata"]["name"]
        await try_pod(client, namespace, name, job)
        applied = await client.apply(TRAINING_JOBS, namespace, name, job)
        console.print(f"TrainingJob {namespace}/{name} is applied, generation {applied['metadata']['generation']}.")
        with contextlib.suppress(ApiError):  # the job is applied even if the caller may not read the version
            if outdated := template_outdated(await client.server_version()):
                console.print(f"{outdated}.")
        if detach:
            return 0
        return await follow_job(client, namespace, name, console)


async def follow(target: Target, name: str) -> int:
    async with target.connect() as (client, namespace):
        return await follow_job(client, namespace, name, console)


async def table(target: Target, all_namespaces: bool) -> None:
    async with target.connect() as (client, namespace):
        jobs, _ = await client.list_all(TRAINING_JOBS, None if all_namespaces else namespace)
    if jobs:
        console.print(show.table(jobs, all_namespaces))
    else:
        console.print("There are no TrainingJobs." if all_namespaces else f"Namespace {namespace} has no TrainingJobs.")


async def detail(target: Target, name: str) -> None:
    async with target.connect() as (client, namespace):
        job = await client.get(TRAINING_JOBS, namespace, name)
        console.print(show.detail(job, await events_of(client, job)))


async def members(target: Target, name: str) -> None:
    async with target.connect() as (client, namespace):
        world = status_of(await client.get(TRAINING_JOBS, namespace, name)).world
        job_pods, _ = await client.list_all(PODS, namespace, f"{JOB}={name}")
        pods = {pod["metadata"]["name"]: pod for pod in job_pods}
        report = None
        if world.coordinator in pods:
            try:
                report = await report_of(client, namespace, pods[world.coordinator])
            except (ApiError, ProtocolError) as error:
                console.print(
                    f"The coordinator {world.coordinator} can't be reached, so states and steps are unknown: {error}"
                )
    if world.members:
        console.print(show.members(world, pods, report))
    else:
        console.print(f"{name} has no members now; `concertina status {name}` says why.")


async def set_suspend(target: Target, name: str, suspend: bool) -> None:
    async with target.connect() as (client, namespace):
        current_job = await client.get(TRAINING_JOBS, namespace, name)
        if bool(current_job["spec"].get("suspend")) == suspend:
            console.print(f"{name} is {'suspended already' if suspend else 'not suspended'}.")
            return
        await client.patch(TRAINING_JOBS, namespace, name, {"spec": {"suspend": suspend}})
    if suspend:
        stored = (current_job["spec"].get("checkpoint") or {}).get("uri")
        state = "saves its state" if stored else "loses its state (spec.checkpoint.uri is not set)"
        console.print(
            f"{name} stops after its current step, {state} and releases its pods. To continue: "
            f"`concertina resume {name}`."
        )
    else:
        console.print(f"{name} continues as soon as its pods run. To follow it: `concertina status -f {name}`.")


async def scale(target: Target, name: str, replicas: int) -> None:
    async with target.connect() as (client, namespace):
        current_scale = await client.get(TRAINING_JOBS, namespace, name, subresource="scale")
        await client.scale(TRAINING_JOBS, namespace, name, replicas)
    console.print(f"{name} wants {amount(replicas, 'replica')} (before: {current_scale['spec']['replicas']}).")
