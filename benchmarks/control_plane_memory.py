"""The memory of an operator that starts where there are many of the largest jobs that the API server accepts."""

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
"""1.3 MB of what takes most memory when it is decoded; the API server stores 1.5 MiB."""
AT_ONCE = 2
START_SECONDS = 600.0
"""To give up: the API server takes half a second for each object."""
SETTLE_SECONDS = 20.0
"""From the operator's start: it also writes a status for each of them."""


async def play(objects: int, table: dict[str, list[float]]) -> None:
    """Measure the start of an operator beside so many objects. A row says its unit if that is not seconds."""
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
    """A job whose template has a field that nobody knows, which the API server keeps."""
    job = manifest(name, 1, 1)
    job["spec"]["suspend"] = True
    job["spec"]["template"]["spec"]["junk"] = [[]] * EMPTY_LISTS
    return job


def _highest_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
