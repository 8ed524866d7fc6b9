"""Main loop of the node agent: it registers the node, renews its Lease, and runs a task for each pod bound to it."""

import asyncio
import json
import logging
import os
import shutil
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from concertina.local.node import node_server
from concertina.local.node.node import Addresses, Node, NodeConfig
from concertina.local.node.node_client import STRATEGIC_MERGE, NodeClient, RequestRefused
from concertina.local.node.node_status import now
from concertina.local.node.pods.node_pod import Pod
from concertina.local.node.runtime.runtime_client import RuntimeClient

Object = dict[str, Any]
_log = logging.getLogger(__name__)
VERSION = "v1.36.3"
_RETRY = 0.2  # seconds
_LEASE_SECONDS, _RENEW = 8, 2.0  # the control plane marks a node as lost after 8 s of silence
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def main(folder: Path, link: socket.socket) -> NoReturn:
    """Run the kubelet of a node until this process is killed.

    Args:
        folder: Folder of the node.
        link: Socket to the runtime.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = NodeConfig(**json.loads((folder / "node.json").read_text()))
    try:
        asyncio.run(_run(config, folder, link))
    except BaseException:
        _log.exception("the kubelet of node %s ends, so the node ends too", config.name)
    finally:
        os._exit(1)


async def _run(config: NodeConfig, folder: Path, link: socket.socket) -> None:
    await Kubelet(config, folder, RuntimeClient(link)).run()


class Kubelet:
    """Agent of one node of the local cluster. It runs the node's pods, as a kubelet does."""

    def __init__(self, config: NodeConfig, folder: Path, runtime: RuntimeClient) -> None:
        pki = Path(config.pki)
        tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        tls.load_cert_chain(pki / f"node-{config.name}.crt", pki / f"node-{config.name}.key")
        prefix = config.address.rpartition(".")[0]
        self._node = Node(config, folder, NodeClient(config.server, tls), runtime, Addresses(prefix))
        self._pods: dict[str, Pod] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run the node agent until an error occurs."""
        self._node.runtime.listen()
        await node_server.serve(self._node.config, self._find)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_registered())
            group.create_task(self._keep_lease())
            group.create_task(self._follow_pods())

    def _find(self, namespace: str, name: str) -> Pod | None:
        key = (namespace, name)
        matching_pods = [
            pod
            for pod in self._pods.values()
            if (pod.object["metadata"]["namespace"], pod.object["metadata"]["name"]) == key
        ]
        return matching_pods[-1] if matching_pods else None

    # Pods

    async def _follow_pods(self) -> None:
        first = True
        async for kind, items in self._node.client.follow("/api/v1/pods", f"spec.nodeName={self._node.config.name}"):
            if kind == "LIST":
                self._drop_missing({item["metadata"]["uid"] for item in items})
                if first:
                    self._remove_orphans({item["metadata"]["uid"] for item in items})
                    first = False
            for item in items:
                self._see(kind, item)

    def _see(self, kind: str, item: Object) -> None:
        uid = item["metadata"]["uid"]
        if kind == "DELETED":
            self._drop(uid)
        elif uid in self._pods:
            self._pods[uid].update(item)
        else:
            self._pods[uid] = Pod(self._node, item)

    def _drop_missing(self, present: set[str]) -> None:
        for uid in [uid for uid in self._pods if uid not in present]:
            self._drop(uid)

    def _drop(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod:
            task = pod.remove()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _remove_orphans(self, present: set[str]) -> None:
        folder = self._node.folder / "pods"
        for path in folder.iterdir() if folder.exists() else ():
            if path.name not in present:
                shutil.rmtree(path, ignore_errors=True)

    # The node and its lease

    async def _keep_registered(self) -> None:
        """Register the node at the start, and again whenever its Node object is deleted or is not Ready."""
        await self._insist(self._register)
        async for kind, items in self._node.client.follow("/api/v1/nodes", f"metadata.name={self._node.config.name}"):
            if kind == "DELETED" or not items or not _is_ready(items[0]):
                await self._insist(self._register)

    async def _keep_lease(self) -> None:
        while True:
            await self._insist(self._renew)
            await asyncio.sleep(_RENEW)

    async def _insist(self, action: Callable[[], Awaitable[None]]) -> None:
        """Call `action` repeatedly until it succeeds.

        At first, the API server may be unreachable or may not know the Node object yet.
        """
        while True:
            try:
                await action()
                return
            except (RequestRefused, aiohttp.ClientError, TimeoutError, OSError) as error:
                _log.warning("node %s: %s", self._node.config.name, error or type(error).__name__)
            await asyncio.sleep(_RETRY)

    async def _register(self) -> None:
        config, client = self._node.config, self._node.client
        labels = {
            "kubernetes.io/hostname": config.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": _ARCHITECTURES.get(os.uname().machine, os.uname().machine),
        }
        metadata = {"name": config.name, "labels": labels}
        status = _node_status(config)
        try:
            await client.call("POST", "/api/v1/nodes", {"metadata": metadata, "status": status})
        except RequestRefused as error:
            if error.status != 409:
                raise
            await client.call("PATCH", f"/api/v1/nodes/{config.name}/status", {"status": status}, STRATEGIC_MERGE)
        _log.info("node %s is registered", config.name)

    async def _renew(self) -> None:
        name = self._node.config.name
        stamp = f"{now()[:-1]}.{time.time_ns() // 1000 % 10**6:06d}Z"
        spec = {"holderIdentity": name, "leaseDurationSeconds": _LEASE_SECONDS, "renewTime": stamp}
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        try:
            await self._node.client.call("PATCH", f"{leases}/{name}", {"spec": spec}, STRATEGIC_MERGE)
        except RequestRefused as error:
            if error.status != 404:
                raise
            await self._node.client.call("POST", leases, {"metadata": {"name": name}, "spec": spec})


def _is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _node_status(config: NodeConfig) -> Object:
    kernel = os.uname()
    healthy = [("MemoryPressure", "False"), ("DiskPressure", "False"), ("PIDPressure", "False"), ("Ready", "True")]
    return {
        "capacity": config.resources,
        "allocatable": config.resources,
        "addresses": [{"type": "InternalIP", "address": config.address}, {"type": "Hostname", "address": config.name}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": config.port}},
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": "LocalNode",
                "message": "",
                "lastHeartbeatTime": now(),
                "lastTransitionTime": now(),
            }
            for kind, status in healthy
        ],
        "nodeInfo": {
            "machineID": socket.gethostname(),
            "systemUUID": config.name,
            "bootID": f"{time.time_ns():x}",
            "kernelVersion": kernel.release,
            "osImage": "concertina local node (processes of this machine)",
            "containerRuntimeVersion": "concertina://1",
            "kubeletVersion": VERSION,
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": _ARCHITECTURES.get(kernel.machine, kernel.machine),
        },
    }
