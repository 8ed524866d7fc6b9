"""`concertina logs`: the containers 'trainer' of a job's pods, merged, each line after its pod's name."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from concertina.api import TRAINER
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, Gone, Unreachable
from concertina.kube.manifests.names import INDEX, JOB
from concertina.kube.parse.views import status_of
from concertina.kube.resources import PODS, TRAINING_JOBS, Raw
from concertina.terminal.connection import Complaint, Target
from concertina.terminal.follow import states
from concertina.terminal.show import ended


async def print_logs(target: Target, job: str, follow: bool, replica: int | None, tail: int | None) -> None:
    async with target.connect() as (client, namespace):
        await client.get(TRAINING_JOBS, namespace, job)
        labels = f"{JOB}={job}" + (f",{INDEX}={replica}" if replica is not None else "")
        if follow:
            await _follow(client, namespace, job, labels, tail)
            return
        pods = [pod for pod in (await client.list_all(PODS, namespace, labels))[0] if _has_log(pod)]
        if not pods:
            which = f"replica {replica}" if replica is not None else "replicas"
            raise Complaint(f"{job} has no {which} with a log yet; `concertina status {job}` says why.")
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
            await _print(client, namespace, pod["metadata"]["name"], False, tail)


def _has_log(pod: Raw) -> bool:
    """Whether the container 'trainer' has started (the API server refuses to read a log before)."""
    containers = pod.get("status", {}).get("containerStatuses") or []
    return any(c["name"] == TRAINER and "waiting" not in c["state"] for c in containers)


async def _print(client: Client, namespace: str, pod: str, follow: bool, tail: int | None) -> None:
    try:
        async for line in client.logs(namespace, pod, TRAINER, follow, tail):
            sys.stdout.write(f"{pod} | {line}\n")
            sys.stdout.flush()
    except ApiError as error:
        sys.stderr.write(f"{pod}: its log ends here: {error}\n")


async def _follow(client: Client, namespace: str, job: str, labels: str, tail: int | None) -> None:
    """Until the job is over and all has been printed; a pod that comes later is printed from its start on."""
    async with asyncio.TaskGroup() as printing:

        async def each_pod() -> None:
            async for pod, last in _starting(client, namespace, labels, tail):
                printing.create_task(_print(client, namespace, pod, True, last))

        pods = printing.create_task(each_pod())
        async for state in states(client, namespace, job):
            if ended(status_of(state)):
                break
        pods.cancel()


async def _starting(
    client: Client, namespace: str, labels: str, tail: int | None
) -> AsyncIterator[tuple[str, int | None]]:
    """Names of the pods whose container 'trainer' has started, each once, with the number of lines to begin with."""
    seen: set[str] = set()
    while True:
        pods, version = await client.list_all(PODS, namespace, labels)
        for pod in pods:
            if _has_log(pod) and pod["metadata"]["uid"] not in seen:
                seen.add(pod["metadata"]["uid"])
                yield pod["metadata"]["name"], tail
        try:
            async for event, pod in client.watch(PODS, namespace, version, labels):
                if event in ("ADDED", "MODIFIED") and _has_log(pod) and pod["metadata"]["uid"] not in seen:
                    seen.add(pod["metadata"]["uid"])
                    yield pod["metadata"]["name"], None
        except (Gone, Unreachable):
            continue
