"""Other operators that run jobs with the same number of pods: PyTorchJob, JobSet and TrainJob.

Each operator has a separate control plane. The given folder contains the programs in `bin/` and their sources in
`src/`, under the names in `control_plane_kinds`. Manifests and configurations are used without changes. The rate of the
operators' requests to the API server is not limited. The operators use no leader election, and their webhooks listen on
this machine. Their pods run but do nothing: no process group is formed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import json
import math
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import control_plane_hosts as hosts
import yaml
from control_plane_cluster import AUDIT, START_SECONDS, SYNC_SECONDS, Meter, Requests, control_plane, kubeconfig_of
from control_plane_jobs import NAMESPACE, Jobs
from control_plane_kinds import Peer, Program
from until import until

from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.resources import Raw
from concertina.local.cluster import LocalCluster
from concertina.local.control_plane.certificates import ClusterAuthority
from concertina.local.host import linux_namespaces, processes
from concertina.local.state import lifetime

SYSTEM = "peers"
HERE = "127.0.0.1"
CERTIFICATES = Path("k8s-webhook-server/serving-certs")
"""Default path of a webhook's certificates in controller-runtime, relative to the folder for temporary files."""
AWAITED = Path("/tmp") / CERTIFICATES / "tls.crt"
"""File for which training-operator waits, even if it uses other certificates."""
ROTATED = "training-operator-webhook-cert"
"""Secret in which training-operator stores its own certificates. They are not used."""
NETWORK = "10.200"
"""Network of the pods' addresses. Nothing connects to them.

An EndpointSlice can't contain loopback addresses.
"""
OF_CONTROLLER_MANAGER = ("job-controller", "endpoint-controller", "endpointslice-controller")
"""Controllers of kube-controller-manager that do part of the work for a peer that creates Jobs and Services."""


class PeerJobs(Jobs):
    def __init__(self, client: Client, peer: Peer) -> None:
        super().__init__(client)
        self.resource = peer.resource
        self._peer = peer

    def _manifest(self, name: str, replicas: int) -> Raw:
        version = self.resource.api.removeprefix("apis/")
        metadata = {"name": name, "namespace": NAMESPACE}
        return {"apiVersion": version, "kind": self._peer.kind, "metadata": metadata, "spec": self._peer.spec(replicas)}

    def _on_job(self, kind: str, job: Raw) -> None:
        seen = self.seen.get(job["metadata"].get("name", ""))
        if seen is not None and self._peer.runs(job.get("status") or {}, seen.wanted):
            seen.trained_at = min(seen.trained_at, time.time())


@contextlib.contextmanager
def operating(peer: Peer, folder: Path, cluster: LocalCluster) -> Iterator[Mapping[str, subprocess.Popen[bytes]]]:
    """Run the peer's programs, and yield their processes by name."""
    work = cluster.directory / SYSTEM
    pair = ClusterAuthority(cluster.directory / "pki").issue("webhooks", "webhooks", hosts=[HERE])
    (work / CERTIFICATES).mkdir(parents=True)
    shutil.copy(pair.certificate, work / CERTIFICATES / "tls.crt")
    shutil.copy(pair.key, work / CERTIFICATES / "tls.key")
    AWAITED.parent.mkdir(parents=True, exist_ok=True)
    AWAITED.touch()
    cluster.create_namespace(SYSTEM)
    cluster.kubectl("create", "secret", "generic", ROTATED, "-n", SYSTEM)
    ports = dict(zip(peer.programs, processes.free_ports(HERE, len(peer.programs)), strict=True))
    for program, port in ports.items():
        _install(program, folder / "src" / program.name, port, cluster)
    until("custom resources are served", START_SECONDS, lambda: _served(cluster))
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for program, port in ports.items():
            running[program.name] = _begin(program, program.command(folder, port, work), work, cluster)
        for program, port in ports.items():
            until(f"{program.name} serves its webhooks", START_SECONDS, functools.partial(_listens, port))
            for path in program.objects:
                cluster.kubectl("apply", "-f", str(folder / "src" / program.name / path))
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _install(program: Program, source: Path, port: int, cluster: LocalCluster) -> None:
    for path in program.resources:
        cluster.kubectl("apply", "--server-side", "-f", str(source / path))
    authority = base64.b64encode((cluster.directory / "pki/ca.crt").read_bytes()).decode()
    for hooks in yaml.safe_load_all(cluster.kubectl("kustomize", str(source / program.webhooks))):
        if hooks["kind"] == "Service":
            continue
        hooks["metadata"] = {"name": program.name}  # Under its own name, training-operator would install another CA.
        for hook in hooks["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://{HERE}:{port}{path}", "caBundle": authority}
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(hooks))
    cluster.kubectl("create", "serviceaccount", program.name, "-n", SYSTEM)
    account = f"--serviceaccount={SYSTEM}:{program.name}"
    cluster.kubectl("create", "clusterrolebinding", program.name, "--clusterrole=cluster-admin", account)


def _served(cluster: LocalCluster) -> bool:
    """Return whether the API server serves all custom resources.

    Their conditions are not enough, because they become true too early. `kubectl wait` fails if no such object exists.
    """
    resources = cluster.api.call("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")["items"]
    return all(
        cluster.api.exists(f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}")
        for spec in (each["spec"] for each in resources)
        for version in spec["versions"]
        if version["served"]
    )


def _begin(program: Program, command: Sequence[str], work: Path, cluster: LocalCluster) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(work),
        "KUBECONFIG": str(kubeconfig_of(cluster, SYSTEM, program.name)),
        "MY_POD_NAMESPACE": SYSTEM,
    }
    with (cluster.record.logs / f"{program.name}.log").open("ab") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, preexec_fn=linux_namespaces.die_with_parent
        )


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HERE, port), timeout=1).close()
    except OSError:
        return False
    return True


async def play(peer: Peer, number: int, pods: int, options: argparse.Namespace, table: dict[str, list[float]]) -> None:
    """Create the given number of jobs at once, wait until all of them run, and record the results in `table`."""
    print(f"{number}x{pods}: {peer.kind} ...", flush=True)
    users = [f"system:serviceaccount:{SYSTEM}:{program.name}" for program in peer.programs]
    users += [f"system:serviceaccount:kube-system:{each}" for each in OF_CONTROLLER_MANAGER]
    with (
        control_plane(print, users) as cluster,
        hosts.running(options.processes, options.nodes, cluster.kubeconfig, NETWORK, cluster.record.logs) as nodes,
        operating(peer, options.peers, cluster) as operators,
    ):
        cluster.wait_nodes([f"node-{node}" for node in range(options.nodes)])
        async with Client(await access.load(str(cluster.kubeconfig))) as client:
            meter = Meter(cluster, operators, tuple(host.pid for host in nodes.each))
            requests, jobs = Requests(cluster.directory / AUDIT), PeerJobs(client, peer)
            following = asyncio.create_task(jobs.follow())
            requests.more()
            nodes.longest_standstill()
            before, begun = meter.usage(), time.time()
            names = [f"job-{each}" for each in range(number)]
            making = asyncio.create_task(jobs.create(names, pods))
            await asyncio.sleep(0)
            reached = await jobs.until("run", begun, options.limit, lambda _, job: job.trained_at < math.inf)
            after = meter.usage()
            table |= {f"until {mark} of the jobs run": [seconds] for mark, seconds in reached.items()}
            table |= {f"{who}: processor time": [spent] for who, spent in after.cpu_since(before).items()}
            table |= {f"{who}: memory at the highest, MiB": [each] for who, each in after.memory().items()}
            table["nodes and agents: longest standstill"] = [nodes.longest_standstill()]
            await asyncio.sleep(SYNC_SECONDS)
            asked = [each for each in requests.more() if each.at <= jobs.of(each.name).trained_at]
            rows = Counter(each.who for each in asked) + Counter(f"{each.who}: {each.what}" for each in asked)
            unit = "requests a job until it runs"
            table |= {f"{row}: {unit}": [times / number] for row, times in rows.most_common()}
            await making
            following.cancel()
    if reached["all"] < math.inf:
        lifetime.forget(cluster.name)
