"""Indexed Job that builds training data.

Each of its pods builds a share of the data, and the last pod to finish writes the manifest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version

import yaml

from concertina.kube.client import Client
from concertina.kube.errors import ApiError, NotFound
from concertina.kube.resources import JOBS, PODS, Raw
from concertina.terminal.characters import harmless
from concertina.terminal.cluster_connection import Target, UserError

HOPELESS_EXITS = (2, 78)
"""Exit statuses of the build after which a retry can't succeed: wrong options, and invalid input."""
_LOOK_SECONDS = 1.0
_LAST_LINES = 40
"""Number of lines to read from the end of a pod's log: what the pod read and left out, and how the build ended."""


@dataclass(frozen=True)
class DataJobOptions:
    """Options for the Indexed Job that builds the data."""

    arguments: tuple[str, ...]
    """Arguments with which each pod runs `concertina data build`."""
    pods: int
    image: str
    secret: str = ""
    claims: tuple[str, ...] = ()
    cpus: int = 2
    memory: str = "4Gi"


def default_image() -> str:
    return f"concertina/trainer:{version('concertina-cli')}"


def manifest(options: DataJobOptions) -> Raw:
    """Return the manifest of the Indexed Job that builds the data.

    The Job's name is derived from the options. A second run of the same command therefore follows the Job that is
    already running.
    """
    digest = hashlib.sha256(repr(options).encode()).hexdigest()[:10]
    labels = {"app.kubernetes.io/managed-by": "concertina", "app.kubernetes.io/component": "data-build"}
    claims = [_claim(text, i) for i, text in enumerate(options.claims)]
    arguments = [argument.replace("$(", "$$(") for argument in options.arguments]
    share = f"$(JOB_COMPLETION_INDEX)/{options.pods}"
    container: Raw = {
        "name": "build",
        "image": options.image,
        "command": ["python3", "-m", "concertina_trainer.cli", "data", "build"],
        "args": ["--share", share, "--processes", str(options.cpus), *arguments],
        "resources": {
            "requests": {"cpu": str(options.cpus), "memory": options.memory},
            "limits": {"memory": options.memory},
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, _, path in claims],
    }
    if options.secret:
        container["envFrom"] = [{"secretRef": {"name": options.secret}}]
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim, _ in claims]
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"data-build-{digest}", "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": options.pods,
            "parallelism": options.pods,
            "backoffLimitPerIndex": 5,
            "ttlSecondsAfterFinished": 86400,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "build", "operator": "In", "values": [*HOPELESS_EXITS]},
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _claim(text: str, index: int) -> tuple[str, str, str]:
    """Return the volume name, the PersistentVolumeClaim and the mount path for an option NAME=PATH.

    Raises:
        UserError: When the option does not have that form.
    """
    name, separator, path = text.partition("=")
    if not (name and separator and path.startswith("/")):
        raise UserError(f"--claim {text}: give it as NAME=PATH, for example corpus=/data")
    return f"claim-{index}", name, path


def text(options: DataJobOptions) -> str:
    return yaml.safe_dump(manifest(options), sort_keys=False)


async def run(target: Target, options: DataJobOptions) -> int:
    """Create the Job, unless the same Job is running already, and follow it until it ends."""
    job = manifest(options)
    name = job["metadata"]["name"]
    async with target.connect() as (client, namespace):
        await _delete_ended_job(client, namespace, name)
        await client.apply(JOBS, namespace, name, job)
        print(f"Job {namespace}/{name}: {options.pods} pods; Ctrl-C stops following, not the job.", flush=True)
        printed_count = -1
        while True:
            current_job = await client.get(JOBS, namespace, name)
            done_count = int(current_job.get("status", {}).get("succeeded") or 0)
            if done_count != printed_count:
                print(f"{done_count} of {options.pods} shares done", flush=True)
                printed_count = done_count
            if ending := _ended(current_job):
                return await _print_ending(client, namespace, name, ending)
            await asyncio.sleep(_LOOK_SECONDS)


async def _delete_ended_job(client: Client, namespace: str, name: str) -> None:
    """Delete an earlier Job of this name that has ended, so that the data is built again.

    The sources of the data may have changed since that Job.
    """
    while True:
        try:
            job = await client.get(JOBS, namespace, name)
        except NotFound:
            return
        if not _ended(job):
            return
        await client.delete(JOBS, namespace, name, uid=job["metadata"]["uid"], propagation="Background")
        await asyncio.sleep(_LOOK_SECONDS / 5)


def _ended(job: Raw) -> Raw | None:
    """Return the condition that says how the Job ended; None while it runs."""
    conditions = job.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c["type"] in ("Complete", "Failed") and c["status"] == "True"), None)


async def _print_ending(client: Client, namespace: str, name: str, ending: Raw) -> int:
    """Print the end of the pods' logs, and return exit status 0 if the Job is complete.

    After a success, the logs of successful pods say what the Job built. After a failure, the logs of the other pods
    show the error.

    Raises:
        UserError: When the Job failed.
    """
    complete = ending["type"] == "Complete"
    pods, _ = await client.list_all(PODS, namespace, labels=f"batch.kubernetes.io/job-name={name}")
    lines: dict[str, None] = {}
    for pod in pods:
        if (pod["status"].get("phase") == "Succeeded") == complete:
            lines |= dict.fromkeys(await _last_lines(client, namespace, pod["metadata"]["name"]))
    for line in lines:
        if not complete or "still at work" not in line:
            print(harmless(line))
    if not complete:
        raise UserError(f"Job {namespace}/{name} failed: {ending.get('message') or json.dumps(ending)}")
    return 0


async def _last_lines(client: Client, namespace: str, pod: str) -> list[str]:
    try:
        return [line async for line in client.logs(namespace, pod, tail=_LAST_LINES)]
    except ApiError:
        return []  # If a node is gone, so are the logs of its pods.
