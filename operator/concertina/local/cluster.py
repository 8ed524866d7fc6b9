"""Start, stop and use a local cluster (LocalCluster)."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from concertina.local import nodes, s3
from concertina.local.binaries import programs
from concertina.local.control_plane import components
from concertina.local.control_plane.api import Api, ControlPlaneError
from concertina.local.errors import LocalClusterError
from concertina.local.host import paths, processes
from concertina.local.host.processes import ProcessIdentity
from concertina.local.node import images
from concertina.local.state import lifetime
from concertina.local.state import record as state
from concertina.local.state.record import ClusterRecord, Options

Say = Callable[[str], None]
_READY_TIMEOUT = 90.0  # seconds, to give up
_PORT_TIMEOUT = 30.0  # seconds; as long as processes.kill() waits for the end of a process
_POLL = 0.02
_NODE_BINDING = {
    "metadata": {"name": "concertina:nodes"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node"},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}],
}


def silent(_: str) -> None:
    """Discard a progress message, for callers that show no progress."""


class LocalCluster:
    """Local cluster that has been set up, with its kubeconfig, nodes and control plane components."""

    def __init__(self, record: ClusterRecord) -> None:
        self.record = record
        self.name, self.directory, self.kubeconfig = record.name, record.directory, record.kubeconfig
        self.s3 = s3.load(record.directory / "s3")
        self.api = Api(record.endpoints.address, record.endpoints.api, record.directory / "pki")

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Run kubectl as administrator and return its output.

        Raises:
            LocalClusterError: When kubectl fails, with its error output.
        """
        command = [self.record.kubectl, f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise LocalClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def create_namespace(self, name: str) -> None:
        """Create a namespace and wait for its default service account, which every pod needs."""
        self.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        self._wait_account(name)

    def _wait_account(self, namespace: str) -> None:
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        log = self.record.logs / "kube-controller-manager.log"
        _until(
            lambda: self.api.exists(account),
            _READY_TIMEOUT,
            lambda: f"namespace {namespace} gets no service account; see {log}: {_last_line(log)}",
        )

    # Nodes

    def nodes(self) -> list[str]:
        return self.record.node_names()

    def kill_node(self, name: str) -> None:
        """Send SIGKILL to all processes of the node at the same time, as in a power failure."""
        nodes.kill(self.record, name)

    def stop_node(self, name: str) -> None:
        """Send SIGSTOP to all processes of the node, so that the node stops responding."""
        nodes.stop(self.record, name)

    def cont_node(self, name: str) -> None:
        """Send SIGCONT to all processes of a node after stop_node."""
        nodes.cont(self.record, name)

    def start_node(self, name: str) -> None:
        """Boot a node that was killed. The node becomes Ready some time later (see `wait_nodes`)."""
        if nodes.process(self.record, name) is None:
            nodes.finish_boot(nodes.boot(self.record, [name]))

    def drain_node(self, name: str) -> None:
        """Cordon the node and evict its pods with the Eviction API."""
        nodes.process(self.record, name)
        self.kubectl("drain", name, "--force", "--ignore-daemonsets", "--delete-emptydir-data", timeout=600)

    def taint_node(self, name: str, *taints: str) -> None:
        """Add taints in the form KEY[=VALUE]:EFFECT, or remove taints in the form KEY[:EFFECT]-."""
        nodes.process(self.record, name)
        self.kubectl("taint", "--overwrite", "nodes", name, *taints)

    def uncordon_node(self, name: str) -> None:
        self.kubectl("uncordon", name)

    def wait_nodes(self, names: Sequence[str] | None = None, timeout: float = _READY_TIMEOUT) -> None:
        """Wait until the given nodes (all nodes by default) are Ready and accept pods."""
        awaited_names = set(names or self.nodes())
        _until(
            lambda: awaited_names <= self._schedulable(),
            timeout,
            lambda: f"nodes {', '.join(sorted(awaited_names))} are not Ready; see {self.record.logs}",
        )

    def _schedulable(self) -> set[str]:
        with contextlib.suppress(OSError, ControlPlaneError):
            items = self.api.call("GET", "/api/v1/nodes")["items"]
            return {item["metadata"]["name"] for item in items if _is_schedulable(item)}
        return set()

    # Components of the control plane

    def kill_component(self, name: str) -> None:
        """Send SIGKILL to etcd, kube-apiserver, kube-controller-manager or kube-scheduler."""
        identity = lifetime.find(self.directory, name)
        processes.kill([identity] if identity else [])

    def start_component(self, name: str) -> None:
        """Start a component that was killed, with the same address, port and data.

        A process whose first thread has ended counts as killed, although its other threads may use its port for a
        moment longer. A component that finds its port in use ends, and is not started again.

        Raises:
            LocalClusterError: When another program uses a port of the component.
        """
        if lifetime.find(self.directory, name) is None:
            for port in self.record.endpoints.ports(name):
                self._wait_free(name, port)
            lifetime.spawn(self.directory, name, self.record.commands[name])

    def _wait_free(self, component: str, port: int) -> None:
        address = self.record.endpoints.address
        _until(
            lambda: processes.can_listen(address, port),
            _PORT_TIMEOUT,
            lambda: f"{component} can't be started: another program listens at {address}:{port}",
        )

    def wait_api(self, timeout: float = _READY_TIMEOUT) -> None:
        """Wait until the API server is ready."""
        log = self.record.logs / "kube-apiserver.log"
        _until(
            lambda: self.api.exists("/readyz"),
            timeout,
            lambda: f"the API server is not ready; see {log}: {_last_line(log)}",
        )

    def running(self) -> dict[str, ProcessIdentity | None]:
        """Return the first process of each component of the control plane and of each node, keyed by name.

        The value is None if the component or node does not run.
        """
        component_processes = {name: lifetime.find(self.directory, name) for name in components.COMPONENTS}
        return component_processes | {name: nodes.process(self.record, name) for name in self.nodes()}


def attach(name: str) -> LocalCluster:
    """Return the cluster with this name, which must have been set up before.

    Raises:
        LocalClusterError: When there is no cluster with this name, or when it is on another machine.
    """
    folder = state.directory(name)
    lifetime.only_here(folder)
    record = state.load(folder)
    if record is None:
        raise LocalClusterError(f"there is no local cluster {name}: start it with `concertina local up`.")
    return LocalCluster(record)


def serving(server: str) -> LocalCluster | None:
    """Return this user's local cluster whose API server has the given URL (https://HOST:PORT), or None."""
    for file in paths.clusters().glob("*/cluster.json"):
        record = state.load(file.parent)
        if record and server.rstrip("/") == f"https://{record.endpoints.address}:{record.endpoints.api}":
            return LocalCluster(record)
    return None


def up(name: str, options: Options, say: Say = silent) -> LocalCluster:
    """Start a cluster that continues to run after this process ends. If the cluster already runs, leave it unchanged.

    If only a part of the cluster runs, for example after a restart of the machine, the remaining processes and files
    are removed first.

    Raises:
        LocalClusterError: When the cluster runs with other options, or cannot be started.
    """
    folder = state.directory(name)
    with lifetime.alone(name):
        existing = state.load(folder)
        if existing and all(LocalCluster(existing).running().values()):
            if existing.options != options:
                raise LocalClusterError(
                    f"cluster {name} is up with other options: `concertina local down --name {name}` first."
                )
            return LocalCluster(existing)
        binaries = programs.control_plane(say)
        if options.next_kubernetes:
            binaries |= programs.find(programs.NEXT_KUBERNETES, say)
        lifetime.tear_down(folder)
        try:
            return _create(name, folder, options, binaries, say)
        except BaseException:
            lifetime.tear_down(folder)
            raise


def down(name: str) -> None:
    """Stop all processes of the cluster and delete its files except the logs. The cluster need not exist."""
    lifetime.end(name)


@contextlib.contextmanager
def owned(name: str, options: Options, say: Say = silent) -> Iterator[LocalCluster]:
    """Context manager for a cluster that exists only while the block runs.

    The cluster is also stopped after an exception, after Ctrl-C and if this process is killed with SIGKILL.

    Raises:
        LocalClusterError: When a cluster of this name already runs, because this process must not stop that cluster.
    """
    with lifetime.sole_owner(name):
        existing = state.load(state.directory(name))
        if existing and all(LocalCluster(existing).running().values()):
            raise LocalClusterError(
                f"cluster {name} is up already: `concertina local down --name {name}` first, or choose another name."
            )
        with lifetime.guarded(name):
            yield up(name, options, say)


def _create(name: str, folder: Path, options: Options, binaries: dict[str, Path], say: Say) -> LocalCluster:
    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # contains volumes that any user may write to
    address = f"{state.claim_network(folder)}.0.1"
    endpoints = components.Endpoints(address, *processes.free_ports(address, 3))
    components.write_files(folder, endpoints)
    commands = components.commands(folder, endpoints, binaries, _off_by_default(options))
    record = ClusterRecord(name, folder, endpoints, commands, options, str(binaries["kubectl"]))
    (folder / "images.json").write_text(json.dumps(images.own() | options.images))
    state.save(record)
    server = s3.create(folder / "s3", ["concertina"]) if options.s3 else None
    cluster = LocalCluster(record)
    for component in ("etcd", "kube-apiserver"):
        lifetime.spawn(folder, component, commands[component])
    names = [nodes.define(record, index).name for index in range(1, options.nodes + 1)]
    booting = nodes.boot(record, names)
    say("waiting for the API server")
    cluster.wait_api()
    for component in ("kube-controller-manager", "kube-scheduler"):
        lifetime.spawn(folder, component, commands[component])
    cluster.api.call("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", _NODE_BINDING)
    say("waiting for the nodes")
    nodes.finish_boot(booting)
    if server:
        server.start()
    cluster._wait_account("default")
    cluster.wait_nodes(names)
    say(f"ready in {time.monotonic() - begun:.1f} s")
    return cluster


def _off_by_default(options: Options) -> components.OffByDefault:
    """Return the Kubernetes features that `options` require and that Kubernetes does not enable by default."""
    admission = "OwnerReferencesPermissionEnforcement" if options.owner_permissions else ""
    if not options.gang_scheduling:
        return components.OffByDefault(admission=admission)
    if options.next_kubernetes:
        return components.OffByDefault(("GenericWorkload",), "scheduling.k8s.io/v1beta1", admission)
    return components.OffByDefault(("GenericWorkload", "GangScheduling"), "scheduling.k8s.io/v1alpha2", admission)


def _is_schedulable(node: dict[str, object]) -> bool:
    conditions = node["status"].get("conditions", [])  # type: ignore[attr-defined]
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    taints = node["spec"].get("taints", [])  # type: ignore[attr-defined]
    return ready and not any(taint["key"].startswith("node.kubernetes.io/") for taint in taints)


def _until(condition: Callable[[], bool], timeout: float, complaint: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise LocalClusterError(f"{complaint()} (gave up after {timeout:g} s)")
        time.sleep(_POLL)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it is empty"
