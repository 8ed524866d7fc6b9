"""The measured system: a real control plane without nodes, and the operator as a separate process.

The module measures the processor time of each process, and the requests that the operator sends to the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml
from prometheus_client.parser import text_string_to_metric_families

from concertina.api.status import unix_seconds
from concertina.demo.stage import CHECKOUT
from concertina.local import cluster as local
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster
from concertina.local.control_plane import components
from concertina.local.host import linux_namespaces, processes
from concertina.local.state.record import Options

SYSTEM, ACCOUNT = "concertina-system", "bench-concertina"
OPERATOR_USER = f"system:serviceaccount:{SYSTEM}:{ACCOUNT}"
AUDIT = "audit.log"
AS_IT_COMES = "python -m concertina.controller.operator"
START_SECONDS = 60.0
SCRAPE_SECONDS = 5.0
SYNC_SECONDS = 1.0
"""Seconds until the API server has written its latest requests to the audit log."""
TICKS = os.sysconf("SC_CLK_TCK")
_numbers = itertools.count(1)
"""Numbers for the control planes, so that each has separate logs."""


@contextlib.contextmanager
def control_plane(say: Callable[[str], None], audited: Sequence[str] = (OPERATOR_USER,)) -> Iterator[LocalCluster]:
    """Yield a control plane for the benchmark.

    The rate of its clients is not limited, and the requests of the given users are audited. A node counts as lost later
    than in other clusters. If all processes share two cores, Leases may be renewed late.
    """
    with local.owned(f"bench-control-plane-{os.getpid()}-{next(_numbers)}", Options(nodes=0), say) as cluster:
        folder = cluster.directory
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived", "ResponseStarted"],
            "rules": [{"level": "Metadata", "users": list(audited)}, {"level": "None"}],
        }
        (folder / "audit.yaml").write_text(json.dumps(policy))
        flags: dict[str, list[str]] = {
            "kube-apiserver": [
                f"--audit-policy-file={folder / 'audit.yaml'}",
                f"--audit-log-path={folder / AUDIT}",
                "--audit-log-mode=batch",
                "--audit-log-maxsize=4000",
                "--profiling=true",
            ],
            "kube-controller-manager": [
                "--kube-api-qps=1000",
                "--kube-api-burst=1000",
                "--node-monitor-grace-period=40s",
            ],
            "kube-scheduler": ["--kube-api-qps=1000", "--kube-api-burst=1000"],
        }
        for component, more in flags.items():
            cluster.record.commands[component] += more
            start_again(cluster, component)
        print(f"logs: {cluster.record.logs}", flush=True)
        yield cluster


def start_again(cluster: LocalCluster, component: str) -> None:
    """Kill a component of the control plane, and start it again.

    An API server exits at once while the kernel still holds the port of the previous process, so the start is repeated.

    Raises:
        TimeoutError: When the component does not respond in time.
    """
    cluster.kill_component(component)
    give_up = time.monotonic() + START_SECONDS
    while True:
        cluster.start_component(component)
        time.sleep(0.2)
        if cluster.api.exists("/readyz"):
            return
        if time.monotonic() > give_up:
            raise TimeoutError(f"{component} did not start again; see {cluster.record.logs}")


class Operator:
    """Operator process that can be restarted.

    All of its processes have the same identity, like a restarted container.
    """

    def __init__(self, cluster: LocalCluster, command: str = AS_IT_COMES) -> None:
        self.log = cluster.record.logs / "operator.log"
        self._command = shlex.split(command)
        if self._command[0] == "python":
            self._command[0] = sys.executable
        [port] = processes.free_ports("127.0.0.1", 1)
        self._metrics = f"127.0.0.1:{port}"
        self._environment = _installed(cluster) | {"CONCERTINA_METRICS": self._metrics}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, limit: float = START_SECONDS) -> float:
        """Start an operator process, wait until it works, and return the Unix time of the start in seconds.

        Raises:
            TimeoutError: When the process does not work in time.
        """
        before, begun = self._starts(), time.time()
        self._process = self._begin()
        while self._starts() == before:
            if time.time() > begun + limit or self._process.poll() is not None:
                raise TimeoutError(f"the operator did not start; see {self.log}")
            await asyncio.sleep(0.05)
        return begun

    def _begin(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=log,
                preexec_fn=linux_namespaces.die_with_parent,
            )

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(timeout=30)

    def close(self) -> None:
        """End the process with SIGTERM. If it does not end in time, use SIGKILL."""
        if self._process is not None and self._process.poll() is None:
            try:
                self.end(signal.SIGTERM)
            except subprocess.TimeoutExpired:
                self.end()

    async def heard(self) -> int:
        """Return the number of agents connected to the operator, from its metrics.

        Return 0 if the operator does not respond.
        """
        url = f"http://{self._metrics}/metrics"
        try:
            answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=SCRAPE_SECONDS)
        except OSError:
            return 0
        families = text_string_to_metric_families(answer.read().decode())
        streams = next(family for family in families if family.name == "concertina_agent_streams")
        return int(next(sample.value for sample in streams.samples if sample.labels == {"state": "open"}))

    def errors(self) -> Counter[str]:
        """Return how often each exception occurs in the operator's log, keyed by the last line of its traceback."""
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if '"traceback"' in line)
        return Counter(str(line["traceback"]).strip().splitlines()[-1][:200] for line in lines)

    def _starts(self) -> int:
        return self.log.read_text().count('"event":"started"') if self.log.exists() else 0


def _installed(cluster: LocalCluster) -> dict[str, str]:
    """Install the chart without its Deployment, and return the environment of an operator process.

    The process has the permissions of the chart's service account.
    """
    chart = str(CHECKOUT / "charts/concertina")
    options = ("--namespace", SYSTEM, "--create-namespace", "--set", "replicas=0")
    programs.run_helm(cluster.kubeconfig, "install", "bench", chart, *options)
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HOME": "/",
        "KUBECONFIG": str(kubeconfig_of(cluster, SYSTEM, ACCOUNT)),
        "CONCERTINA_NAMESPACE": SYSTEM,
        "CONCERTINA_LEASE": f"{ACCOUNT}-operator",
        "CONCERTINA_MASTER_KEY_SECRET": f"{ACCOUNT}-master-key",
        "CONCERTINA_MASTER_KEY_CREATE": "true",
        "CONCERTINA_IMAGE_AGENT": "concertina/agent:bench",
        "POD_NAME": "operator-of-the-benchmark",
    }


def kubeconfig_of(cluster: LocalCluster, namespace: str, account: str) -> Path:
    """Write a kubeconfig for a service account, and return its path."""
    kubeconfig = yaml.safe_load(cluster.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", account, "-n", namespace, "--duration=24h").strip()
    (user,) = kubeconfig["users"]
    user["user"] = {"token": token}
    path = cluster.directory / f"{account}.kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig))
    return path


@dataclass(frozen=True)
class Used:
    """Resources that a process has used so far."""

    who: str
    cpu: float
    """Processor time in seconds."""
    memory: float
    """Peak memory in MiB."""


@dataclass(frozen=True)
class Usage:
    at: float
    processes: dict[int, Used]
    """Used resources by pid."""

    def cpu_since(self, before: Usage) -> dict[str, float]:
        """Return the processor seconds since `before`. For a restarted process, only the new process counts."""
        spent: dict[str, float] = {}
        for pid, used in self.processes.items():
            known = before.processes.get(pid)
            spent[used.who] = spent.get(used.who, 0.0) + used.cpu - (known.cpu if known else 0.0)
        return spent

    def memory(self) -> dict[str, float]:
        """Return the peak memory in MiB by role of the process. Processes with the same role are added up."""
        return dict(sum((Counter({used.who: used.memory}) for used in self.processes.values()), Counter()))


class Process(Protocol):
    @property
    def pid(self) -> int: ...


@dataclass(frozen=True)
class Meter:
    cluster: LocalCluster
    operators: Mapping[str, Process]
    nodes: tuple[int, ...]
    """Pids of the processes that simulate nodes."""

    def usage(self) -> Usage:
        return Usage(time.time(), {pid: used for pid, who in self._processes() if (used := _used(who, pid))})

    def _processes(self) -> Iterator[tuple[int, str]]:
        for who, process in self.operators.items():
            yield process.pid, who
        running = self.cluster.running()
        for component in components.COMPONENTS:
            if (identity := running[component]) is not None:
                yield identity.pid, component
        for pid in self.nodes:
            yield pid, "nodes and agents"
        yield os.getpid(), "benchmark"


def _used(who: str, pid: int) -> Used | None:
    """Return the resources that a process has used so far, or None if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    highest = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    return Used(who, (int(fields[11]) + int(fields[12])) / TICKS, highest / 1024)


@dataclass(frozen=True)
class Request:
    who: str
    """Last part of the user name."""
    what: str
    """Verb and resource."""
    name: str
    """Name of the object."""
    at: float
    """Unix time of the request in seconds."""


@dataclass
class Requests:
    """Requests of the audited users to the API server, without watches and Leases."""

    path: Path
    _read: int = 0

    def more(self) -> list[Request]:
        """Return the requests since the last call.

        The audit log may contain a request only a second after it was sent.
        """
        requests: list[Request] = []
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                event = json.loads(line)
                about = event.get("objectRef") or {}
                if event["verb"] == "watch" or about.get("resource") in ("leases", None):
                    continue
                what = "/".join(filter(None, (about["resource"], about.get("subresource"))))
                refused = " (refused)" if event["responseStatus"]["code"] >= 400 else ""
                at = unix_seconds(event["requestReceivedTimestamp"])
                who = event["user"]["username"].rpartition(":")[2]
                requests.append(Request(who, f"{event['verb']} {what}{refused}", about.get("name", ""), at))
        return requests
