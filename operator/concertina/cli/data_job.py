"""Building data in the pods of an Indexed Job: each builds its share, and whoever finishes last writes the manifest."""

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
"""What the build exits with where trying again can't help: options that can't be understood, and bad input."""
_LOOK_SECONDS = 1.0
_SAID_LINES = 40
"""Last lines of a pod's log: what it took and left out, and how it ended."""


@dataclass(frozen=True)
class DataJobOptions:
    arguments: tuple[str, ...]
    """Of `concertina data build`."""
    pods: int
    image: str
    secret: str = ""
    claims: tuple[str, ...] = ()
    cpus: int = 2
    memory: str = "4Gi"


def default_image() -> str:
    return f"concertina/trainer:{version('concertina')}"


def manifest(wanted: DataJobOptions) -> Raw:
    """The Job. Its name is the same for the same work, so that asking again follows it."""
    digest = hashlib.sha256(repr(wanted).encode()).hexdigest()[:10]
    labels = {"app.kubernetes.io/managed-by": "concertina", "app.kubernetes.io/component": "data-build"}
    claims = [_claim(text, i) for i, text in enumerate(wanted.claims)]
    given = [argument.replace("$(", "$$(") for argument in wanted.arguments]
    share = f"$(JOB_COMPLETION_INDEX)/{wanted.pods}"
    container: Raw = {
        "name": "build",
        "image": wanted.image,
        "command": ["python3", "-m", "concertina_trainer.cli", "data", "build"],
        "args": ["--share", share, "--processes", str(wanted.cpus), *given],
        "resources": {
            "requests": {"cpu": str(wanted.cpus), "memory": wanted.memory},
            "limits": {"memory": wanted.memory},
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, _, path in claims],
    }
    if wanted.secret:
        container["envFrom"] = [{"secretRef": {"name": wanted.secret}}]
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim, _ in claims]
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"data-build-{digest}", "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": wanted.pods,
            "parallelism": wanted.pods,
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
    """Volume, claim and path of NAME=PATH."""
    name, separator, path = text.partition("=")
    if not (name and separator and path.startswith("/")):
        raise UserError(f"--claim {text}: give it as NAME=PATH, for example corpus=/data")
    return f"claim-{index}", name, path


def text(wanted: DataJobOptions) -> str:
    return yaml.safe_dump(manifest(wanted), sort_keys=False)


async def run(target: Target, wanted: DataJobOptions) -> int:
    """Make the Job, or find the one at work, and follow it to its end."""
    job = manifest(wanted)
    name = job["metadata"]["name"]
    async with target.connect() as (client, namespace):
        await _clear(client, namespace, name)
        await client.apply(JOBS, namespace, name, job)
        print(f"Job {namespace}/{name}: {wanted.pods} pods; Ctrl-C stops following, not the job.", flush=True)
        shown = -1
        while True:
            found = await client.get(JOBS, namespace, name)
            done = int(found.get("status", {}).get("succeeded") or 0)
            if done != shown:
                print(f"{done} of {wanted.pods} shares done", flush=True)
                shown = done
            if ending := _ended(found):
                return await _told(client, namespace, name, ending)
            await asyncio.sleep(_LOOK_SECONDS)


async def _clear(client: Client, namespace: str, name: str) -> None:
    """A Job of this name that has ended makes room: its sources may have changed since."""
    while True:
        try:
            found = await client.get(JOBS, namespace, name)
        except NotFound:
            return
        if not _ended(found):
            return
        await client.delete(JOBS, namespace, name, uid=found["metadata"]["uid"], propagation="Background")
        await asyncio.sleep(_LOOK_SECONDS / 5)


def _ended(job: Raw) -> Raw | None:
    """The condition that says how, once it has."""
    conditions = job.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c["type"] in ("Complete", "Failed") and c["status"] == "True"), None)


async def _told(client: Client, namespace: str, name: str, ending: Raw) -> int:
    """What the pods said last: of success what was built, else what went wrong."""
    complete = ending["type"] == "Complete"
    pods, _ = await client.list_all(PODS, namespace, labels=f"batch.kubernetes.io/job-name={name}")
    said: dict[str, None] = {}
    for pod in pods:
        if (pod["status"].get("phase") == "Succeeded") == complete:
            said |= dict.fromkeys(await _last_lines(client, namespace, pod["metadata"]["name"]))
    for line in said:
        if not complete or "still at work" not in line:
            print(harmless(line))
    if not complete:
        raise UserError(f"Job {namespace}/{name} failed: {ending.get('message') or json.dumps(ending)}")
    return 0


async def _last_lines(client: Client, namespace: str, pod: str) -> list[str]:
    try:
        return [line async for line in client.logs(namespace, pod, tail=_SAID_LINES)]
    except ApiError:
        return []  # a pod whose node is gone has no log any more
