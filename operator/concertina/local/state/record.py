"""Folder and record of a local cluster, locks, and the loopback network that only this cluster uses."""

import contextlib
import fcntl
import json
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from concertina.local.control_plane import certificates
from concertina.local.control_plane.components import Endpoints
from concertina.local.errors import LocalClusterError
from concertina.local.host import paths

_FIRST_NETWORK, _LAST_NETWORK = 16, 250  # x of 127.x.0.0/16; lower ones are left to other programs


@dataclass(frozen=True)
class Options:
    """Options with which a user starts a cluster, such as its number of nodes."""

    nodes: int = 3
    gpus: int = 0  # simulated, per node
    cpus: str = ""  # per node; all of the machine's when empty
    memory: str = ""
    images: dict[str, str] = field(default_factory=dict)  # name: folder of a virtual environment
    s3: bool = False
    gang_scheduling: bool = False  # Kubernetes' own, which is off by default
    owner_permissions: bool = False  # enforced for owner references, as in OpenShift; for tests
    next_kubernetes: bool = False  # control plane of the next version, for tests


@dataclass(frozen=True)
class ClusterRecord:
    """Data of a cluster that are known from its set-up. They do not say whether its processes run."""

    name: str
    directory: Path
    endpoints: Endpoints
    commands: dict[str, list[str]]
    options: Options
    kubectl: str

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def node_names(self) -> list[str]:
        folder = self.directory / "nodes"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def directory(name: str) -> Path:
    """Return the state folder of the cluster with this name.

    Raises:
        LocalClusterError: When the name is invalid.
    """
    if not name or "/" in name or name.startswith("."):
        raise LocalClusterError(f'"{name}" is not a valid name for a cluster: use letters, digits and dashes.')
    return paths.clusters() / name


def save(record: ClusterRecord) -> None:
    """Write a cluster's record into its state folder."""
    data = asdict(record) | {"directory": str(record.directory)}
    certificates.write_private(record.directory / "cluster.json", json.dumps(data, indent=1).encode())


def load(folder: Path) -> ClusterRecord | None:
    """Return the record from a state folder; None if the folder has none."""
    try:
        data = json.loads((folder / "cluster.json").read_text())
    except FileNotFoundError:
        return None
    data["directory"], data["endpoints"] = Path(data["directory"]), Endpoints(**data["endpoints"])
    return ClusterRecord(**data | {"options": Options(**data["options"])})


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Context manager for an exclusive lock on a file.

    Other processes wait for the lock. If `wait` is False, they get a BlockingIOError instead.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def claim_network(folder: Path) -> str:
    """Return a prefix ("127.x") of loopback addresses that no other cluster uses, and record it in the state folder.

    Raises:
        LocalClusterError: When all prefixes are in use.
    """
    claim = folder / "network"
    with locked(paths.clusters() / ".networks"):
        if claim.exists():
            return claim.read_text()
        # Claims of other users can't be read, but the kernel shows the addresses on which their clusters listen. The
        # search starts at a number that depends on user and cluster, because two clusters may start at the same time.
        used_networks = {path.read_text() for path in paths.clusters().glob("*/network")} | _listened_on()
        start = zlib.crc32(f"{os.getuid()}:{folder}".encode())
        span = _LAST_NETWORK - _FIRST_NETWORK + 1
        for step in range(span):
            network = f"127.{_FIRST_NETWORK + (start + step) % span}"
            if network not in used_networks:
                claim.write_text(network)
                return network
    raise LocalClusterError(
        f"all {span} loopback networks are in use by clusters in {paths.clusters()}: take some clusters down."
    )


def _listened_on() -> set[str]:
    """Return the prefix ("127.x") of each IPv4 address on which a process of any user listens; see proc_net_tcp(5)."""
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    addresses = [int(local.partition(":")[0], 16) for _, local, _, state, *_ in sockets if state == "0A"]
    return {".".join(map(str, address.to_bytes(4, sys.byteorder)[:2])) for address in addresses}
