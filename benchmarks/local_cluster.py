"""Local cluster: seconds until it is ready, milliseconds until a pod runs, and memory of all its processes.

python benchmarks/local_cluster.py [--runs N] [--pods N] [--json FILE]

The start of a pod is the time from the request that creates the pod until a watch reports it as Running. This time
includes the API server, the scheduler, the node agent, the process and the status write. At first, pods are created one
after another, then all at once.
"""

import argparse
import asyncio
import os
import ssl
import time
from pathlib import Path

import report

from concertina.local import cluster
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster
from concertina.local.host import processes
from concertina.local.node.node_client import NodeClient
from concertina.local.state import lifetime
from concertina.local.state.record import Options

PODS = "/api/v1/namespaces/default/pods"


async def pod_starts(running: LocalCluster, count: int, together: bool) -> list[float]:
    """Return the seconds from creation to Running for each of `count` pods. The pods are deleted afterwards."""
    tls = ssl.create_default_context(cafile=str(running.directory / "pki" / "ca.crt"))
    tls.load_cert_chain(running.directory / "pki" / "kubeconfig.crt", running.directory / "pki" / "kubeconfig.key")
    client = NodeClient(running.record.endpoints.server, tls)
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


async def _start(client: NodeClient, seen: dict[str, "asyncio.Future[float]"], name: str) -> float:
    seen[name] = asyncio.get_running_loop().create_future()
    container = {"name": "main", "image": "concertina/agent:bench", "command": ["sleep", "1000"]}
    begun = time.perf_counter()
    await client.call("POST", PODS, {"metadata": {"name": name}, "spec": {"containers": [container]}})
    return await asyncio.wait_for(seen[name], 60) - begun


async def _watch(client: NodeClient, seen: dict[str, "asyncio.Future[float]"]) -> None:
    async for _, items in client.follow(PODS, "metadata.namespace=default"):
        for item in items:
            future = seen.get(item["metadata"]["name"])
            if future and not future.done() and item["status"].get("phase") == "Running":
                future.set_result(time.perf_counter())


def memory(running: LocalCluster) -> dict[str, float]:
    """Return the memory of each part of the cluster in MiB of proportional set size, which counts shared pages once."""
    parts: dict[str, float] = {}
    for process in processes.marked(running.directory):
        root = Path(f"/proc/{process.pid}")
        name = Path(os.fsdecode((root / "cmdline").read_bytes().split(b"\0")[0])).name
        part = "node agents" if name.startswith("python") else name
        rollup = (root / "smaps_rollup").read_text()
        kilobytes = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        parts[part] = parts.get(part, 0.0) + kilobytes / 1024
    return parts


def measure(runs: int, pods: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds by row, and the memory of the cluster in the last run."""
    programs.control_plane(print)  # The build of the programs is not part of the measurement.
    ready, one, burst = (
        "up: 3 nodes ready (reach 5)",
        "pod start, one after another (reach 0.05)",
        f"pod start, {pods} at once",
    )
    samples: dict[str, list[float]] = {ready: [], one: [], burst: []}
    used: dict[str, float] = {}
    for run in range(runs):
        name = f"bench-{os.getpid()}-{run}"
        begun = time.perf_counter()
        with cluster.owned(name, Options(nodes=3)) as running:
            samples[ready].append(time.perf_counter() - begun)
            used = memory(running)
            samples[one] += asyncio.run(pod_starts(running, pods, together=False))
            samples[burst] += asyncio.run(pod_starts(running, pods, together=True))
        lifetime.forget(name)
    return samples, used


def main() -> None:
    parser = argparse.ArgumentParser(description="The local cluster: ready, pod start, memory.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pods", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    samples, used = measure(arguments.runs, arguments.pods)
    report.show("local cluster", samples)
    parts = ", ".join(f"{part} {size:.0f}" for part, size in sorted(used.items()))
    print(f"memory of the whole: {sum(used.values()):.0f} MiB ({parts})")
    report.write(arguments.json, "local_cluster", samples, memory_mib=used)


if __name__ == "__main__":
    main()
