"""What pods need beside the agent: ports that don't collide, shared memory, a service mesh kept out of the way."""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.api.quantities import bytes_of
from concertina.kube.resources import Raw
from concertina.plan.types import CreatePod, JobView

PORT_NAME = "concertina"
"""Of the container port that says where a pod's agent listens."""
HOST_PORTS = range(13000, 20000)
"""For pods in the host's network: below the node ports of Services (30000), below the ports that Linux gives to
outgoing connections (32768), below those at which workers meet (20000, `concertina_agent.transfers.store`)."""
SHM = "concertina-shm"
SHM_PATH = "/dev/shm"
SHM_LEAST = 64 << 20
"""What containerd and Docker give."""


def port(job: JobView, pod: Raw, create: CreatePod) -> int:
    """Of the pod's agent. In the host's network it depends on job, index and attempt: replicas of one job differ, so do
    jobs by chance; and since a declared host port is a resource, the scheduler keeps two pods that want the same one
    apart. Where something that is no pod has it, the agent says so and ends, and the next attempt gets another."""
    if not pod.get("hostNetwork"):
        return protocol.PORT
    start = int(job.uid.replace("-", "")[:8], 16)
    return HOST_PORTS[(start + create.index + 1009 * create.attempt) % len(HOST_PORTS)]


def declared(container: Raw, number: int, host: bool) -> list[Raw]:
    """The container's ports with ours: in the host's network the scheduler must know of it."""
    ours: Raw = {"name": PORT_NAME, "containerPort": number, "protocol": "TCP"}
    if host:
        ours["hostPort"] = number
    return [*(container.get("ports") or ()), ours]


def mesh(number: int) -> dict[str, str]:
    """Annotations, over which a template's own win. Workers meet at ports of the kernel's choice, and agents speak
    mutual TLS of their own: a proxy that takes incoming connections breaks the first and can't help the second. What
    the pod asks of others (storage, trackers) still goes through the mesh. Without one they mean nothing."""
    return {
        "traffic.sidecar.istio.io/includeInboundPorts": "",
        "traffic.sidecar.istio.io/excludeOutboundPorts": str(number),
        "config.linkerd.io/skip-inbound-ports": "1-65535",
        "config.linkerd.io/skip-outbound-ports": str(number),
    }


def shared_memory(pod: Raw, trainer: Raw) -> Raw | None:
    """The volume for /dev/shm: data loaders, gloo and NCCL need more there than the 64 MiB that runtimes give. Half of
    the container's memory, as Linux itself does: whoever fills it is told "no space left" instead of being killed. None
    where the template has one of its own, or shares the host's."""
    mounted = {mount["mountPath"].rstrip("/") for mount in trainer.get("volumeMounts") or ()}
    if pod.get("hostIPC") or SHM_PATH in mounted:
        return None
    source: Raw = {"medium": "Memory"}
    if memory := memory_of(trainer):
        source["sizeLimit"] = str(max(memory // 2, SHM_LEAST))
    return {"name": SHM, "emptyDir": source}


def memory_of(container: Raw) -> int:
    """Bytes that the container may use; 0 where nothing bounds it."""
    return bytes_of(((container.get("resources") or {}).get("limits") or {}).get("memory"))
