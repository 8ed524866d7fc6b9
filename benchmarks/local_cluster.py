"""The local cluster: seconds until it is ready, milliseconds until a pod runs, memory of the whole.

python benchmarks/local_cluster.py [--runs N] [--pods N] [--json FILE]

A pod's start is the time from sending its creation to hearing from a watch that it is Running: API server, scheduler,
node agent, process and status write are all in it. Pods are created one after another, then all at once. Every pod has a
token volume, as the API server's admission adds one.
"""

import argparse
import asyncio
import json
import os
import ssl
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from concertina.local import binaries, cluster, lifetime, processes
from concertina.local.cluster import LocalCluster
from concertina.local.node.client import Client
from concertina.local.state import Options

PODS = "/api/v1/namespaces/default/pods"
REACH_READY, REACH_START = 5.0, 50.0  # seconds, milliseconds


async def pod_starts(running: LocalCluster, count: int, together: bool) -> list[float]:
    """Milliseconds from creation to Running, for each of count pods; they are deleted afterwards."""
    tls = ssl.create_default_context(cafile=str(running.directory / "pki" / "ca.crt"))
    tls.load_cert_chain(running.directory / "pki" / "kubeconfig.crt", running.directory / "pki" / "kubeconfig.key")
    client = Client(running.record.endpoints.server, tls)
    seen: dict[str, asyncio.Future[float]] = {}
    watching = asyncio.create_task(_watch(client, seen))
    await asyncio.sleep(0.3)
    try:
        if together:
            return list(await asyncio.gather(*(_start(client, seen, f"burst-{index}") for index in range(count))))
        return [await _start(client, seen, f"one-{index}") for index in range(count)]
    finally:
        watching.cancel()
        await asyncio.gather(*(client.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0}) for name in seen))
        await client.close()


async def _start(client: Client, seen: dict[str, "asyncio.Future[float]"], name: str) -> float:
    seen[name] = asyncio.get_running_loop().create_future()
    container = {"name": "main", "image": "concertina/agent:bench", "command": ["sleep", "1000"]}
    begun = time.perf_counter()
    await client.call("POST", PODS, {"metadata": {"name": name}, "spec": {"containers": [container]}})
    return (await asyncio.wait_for(seen[name], 60) - begun) * 1000


async def _watch(client: Client, seen: dict[str, "asyncio.Future[float]"]) -> None:
    async for _, items in client.follow(PODS, "metadata.namespace=default"):
        for item in items:
            future = seen.get(item["metadata"]["name"])
            if future and not future.done() and item["status"].get("phase") == "Running":
                future.set_result(time.perf_counter())


def memory(running: LocalCluster) -> dict[str, float]:
    """MiB (proportional set size: shared pages are counted once) by part."""
    parts: dict[str, float] = {}
    for process in processes.marked(running.directory):
        root = Path(f"/proc/{process.pid}")
        name = Path(os.fsdecode((root / "cmdline").read_bytes().split(b"\0")[0])).name
        part = "node agents" if name.startswith("python") else name
        rollup = (root / "smaps_rollup").read_text()
        kilobytes = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        parts[part] = parts.get(part, 0.0) + kilobytes / 1024
    return parts


def measure(runs: int, pods: int) -> dict[str, Any]:
    """All numbers."""
    binaries.control_plane(print)  # their build, if any, is no part of this
    ready: list[float] = []
    one: list[float] = []
    burst: list[float] = []
    used: dict[str, float] = {}
    for run in range(runs):
        name = f"bench-{os.getpid()}-{run}"
        begun = time.perf_counter()
        with cluster.owned(name, Options(nodes=3)) as running:
            ready.append(time.perf_counter() - begun)
            used = memory(running)
            one += asyncio.run(pod_starts(running, pods, together=False))
            burst += asyncio.run(pod_starts(running, pods, together=True))
        lifetime.forget(name)
    return {"ready_seconds": ready, "pod_start_ms": one, "pod_start_burst_ms": burst, "memory_mib": used}


def show(result: dict[str, Any], pods: int) -> None:
    """The table for a person."""
    table = Table("what", "runs", "median", "worst", "reach")
    rows: list[tuple[str, Sequence[float], str, str]] = [
        ("up: 3 nodes ready, s", result["ready_seconds"], f"{REACH_READY:g}", ".2f"),
        ("pod start, one after another, ms", result["pod_start_ms"], f"{REACH_START:g} (median)", ".0f"),
        (f"pod start, {pods} at once, ms", result["pod_start_burst_ms"], "", ".0f"),
    ]
    for what, values, reach, form in rows:
        table.add_row(what, str(len(values)), format(statistics.median(values), form), format(max(values), form), reach)
    total = sum(result["memory_mib"].values())
    parts = ", ".join(f"{part} {size:.0f}" for part, size in sorted(result["memory_mib"].items()))
    table.add_row("memory of the whole, MiB", str(len(result["ready_seconds"])), f"{total:.0f}", "", parts)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="The local cluster: ready, pod start, memory.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pods", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.runs, arguments.pods)
    show(result, arguments.pods)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
