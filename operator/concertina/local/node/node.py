"""Data and connections that all pods of a node share: configuration, client, runtime, addresses and images."""

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concertina.local.node import images
from concertina.local.node.node_client import NodeClient, RequestRefused
from concertina.local.node.node_status import now
from concertina.local.node.runtime.runtime_client import RuntimeClient

Object = dict[str, Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeConfig:
    """Configuration of a node agent, as stored in nodes/NAME/node.json of the cluster's state folder.

    Folders and addresses are those of this machine.
    """

    name: str
    address: str  # 127.x.n.1; its pods get 127.x.n.2 and above
    cpus: str
    memory: str  # quantities
    gpus: int
    api_host: str
    api_port: int
    pki: str
    images: str  # file with the image mapping, read at each pull
    port: int  # at the address; the API server reads it from the Node

    @property
    def server(self) -> str:
        return f"https://{self.api_host}:{self.api_port}"

    @property
    def resources(self) -> dict[str, str]:
        """Capacity of the node by resource. All of the capacity is allocatable."""
        basic = {"cpu": self.cpus, "memory": self.memory, "pods": "250", "ephemeral-storage": "100Gi"}
        return basic | ({"nvidia.com/gpu": str(self.gpus)} if self.gpus else {})


@dataclass
class Addresses:
    """Pool of IP addresses for the pods of a node. Addresses are assigned in turn, so that none is reused soon."""

    prefix: str  # 127.x.n
    _used: set[int] = field(default_factory=set)
    _last: int = 1

    def take(self) -> str:
        """Return a free address and mark it as used.

        Raises:
            RuntimeError: When all addresses are in use.
        """
        for _ in range(253):
            self._last = 2 + (self._last - 1) % 253
            if self._last not in self._used:
                self._used.add(self._last)
                return f"{self.prefix}.{self._last}"
        raise RuntimeError(f"all 253 addresses of {self.prefix} are taken")

    def release(self, address: str) -> None:
        self._used.discard(int(address.rpartition(".")[2]))


@dataclass
class Node:
    """Data and connections that all pods of a node share."""

    config: NodeConfig
    folder: Path
    client: NodeClient
    runtime: RuntimeClient
    addresses: Addresses
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def image(self, name: str) -> images.Image | None:
        """Return the folder and command for an image name; None if the name is not mapped."""
        mapping: dict[str, str] = json.loads(Path(self.config.images).read_text())
        return images.find(name, mapping)

    def warn(self, pod: Object, reason: str, message: str) -> None:
        """Create a warning event about a pod, in the background."""
        _log.info("%s/%s: %s: %s", pod["metadata"]["namespace"], pod["metadata"]["name"], reason, message)
        task = asyncio.get_running_loop().create_task(self._send_event(pod, reason, message))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send_event(self, pod: Object, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        about = {"apiVersion": "v1", "kind": "Pod", **{key: metadata[key] for key in ("name", "namespace", "uid")}}
        event = {
            "metadata": {"name": f"{metadata['name']}.{time.time_ns():x}", "namespace": metadata["namespace"]},
            "involvedObject": about,
            "type": "Warning",
            "reason": reason,
            "message": message[:1024],
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
            "source": {"component": "kubelet", "host": self.config.name},
            "reportingComponent": "kubelet",
            "reportingInstance": self.config.name,
        }
        try:
            await self.client.call("POST", f"/api/v1/namespaces/{metadata['namespace']}/events", event)
        except (RequestRefused, OSError, TimeoutError) as error:
            _log.warning("event %s not written: %s", reason, error)
