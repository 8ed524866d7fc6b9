"""Memory of an operator that starts in a cluster with many of the largest jobs that the API server accepts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from control_plane_cluster import AS_IT_COMES, Operator, control_plane
from control_plane_jobs import NAMESPACE, manifest

from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.resources import TRAINING_JOBS, Raw

EMPTY_LISTS = 430_000
"""Number of empty lists in a job. They take 1.3 MB of JSON, and are the JSON that needs the most memory when decoded.

The API server stores objects up to 1.5 MiB.
"""
AT_ONCE = 2
START_SECONDS = 600.0
"""Time limit of the start in seconds. The API server takes half a second for each object."""
SETTLE_SECONDS = 20.0
"""Seconds from the operator's start to the measurement. In this time, the operator writes the status of each job."""


async def play(objects: int, table: dict[str, list[float]]) -> None:
    """Measure the start of an operator in a cluster with the given number of objects.

    The name of a row contains the unit unless the unit is seconds.
    """
    with control_plane(print) as cluster:
        async with Client(await access.load(str(cluster.kubeconfig))) as client:
            operator = Operator(cluster, AS_IT_COMES)
            turns = asyncio.Semaphore(AT_ONCE)

            async def create(number: int) -> None:
                async with turns:
                    await client.create(TRAINING_JOBS, NAMESPACE, _largest(f"large-{number}"))

            await asyncio.gather(*(create(number) for number in range(objects)))
            print(f"{objects} objects stand", flush=True)
            try:
                begun_at = await operator.start(START_SECONDS)
                table["until the operator has started"] = [time.time() - begun_at]
                table["operator: memory at the highest once it has started, MiB"] = [_highest_mib(operator.pid)]
                await asyncio.sleep(SETTLE_SECONDS)
                table[f"operator: the same {SETTLE_SECONDS:g} s later, MiB"] = [_highest_mib(operator.pid)]
                print(table, flush=True)
            finally:
                operator.close()


def _largest(name: str) -> Raw:
    """Return a job whose template has a large unknown field. The API server stores such fields."""
    job = manifest(name, 1, 1)
    job["spec"]["suspend"] = True
    job["spec"]["template"]["spec"]["junk"] = [[]] * EMPTY_LISTS
    return job


def _highest_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
