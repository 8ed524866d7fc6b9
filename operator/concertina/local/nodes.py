"""Operations on the nodes of a local cluster from outside: configure, boot, kill, stop and continue.

A node consists of the first process of its pid namespace and all processes below that process.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from concertina.local.control_plane import certificates
from concertina.local.errors import LocalClusterError
from concertina.local.host import processes
from concertina.local.host.processes import MARKER, ProcessIdentity
from concertina.local.node.node import NodeConfig
from concertina.local.state.record import ClusterRecord

_BOOT_TIMEOUT = 60.0  # seconds


def define(record: ClusterRecord, index: int) -> Path:
    """Write the configuration of a node agent, and return the node's folder.

    Args:
        record: Record of the cluster.
        index: Number of the node, from 1. It determines the node's name and address.
    """
    options, name = record.options, f"node-{index}"
    network = record.endpoints.address.rpartition(".")[0].rpartition(".")[0]
    folder, pki = record.directory / "nodes" / name, record.directory / "pki"
    folder.mkdir(parents=True, exist_ok=True)
    address = f"{network}.{index}.1"
    config = NodeConfig(
        name=name,
        address=address,
        cpus=options.cpus or str(os.cpu_count()),
        memory=options.memory or _memory(),
        gpus=options.gpus,
        api_host=record.endpoints.address,
        api_port=record.endpoints.api,
        pki=str(pki),
        images=str(record.directory / "images.json"),
        port=processes.free_ports(address, 1)[0],  # a real kubelet on the machine would use port 10250 on all addresses
    )
    authority = certificates.ClusterAuthority(pki)
    authority.issue(f"node-{name}", f"system:node:{name}", ["system:nodes"], hosts=[address, name])
    (folder / "node.json").write_text(json.dumps(asdict(config), indent=1))
    return folder


def _memory() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 1024}Ki"


def boot(record: ClusterRecord, names: Sequence[str]) -> "subprocess.Popen[str]":
    """Start to boot nodes, and return the process that boots them. Pass this process to `finish_boot`."""
    folders = [str(record.directory / "nodes" / name) for name in names]
    command = [sys.executable, "-m", "concertina.local.node", *folders]
    environment = os.environ | {MARKER: str(record.directory)}
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish_boot(booting: "subprocess.Popen[str]") -> None:
    """Wait until the nodes have booted. `booting` is the result of `boot`.

    Raises:
        LocalClusterError: When the machine does not allow the Linux namespaces of the nodes.
    """
    _, errors = booting.communicate(timeout=_BOOT_TIMEOUT)
    if booting.returncode:
        lines = dict.fromkeys(errors.strip().splitlines())
        raise LocalClusterError("\n".join(lines) or f"the nodes could not be booted (status {booting.returncode})")


def process(record: ClusterRecord, name: str) -> ProcessIdentity | None:
    """Return the first process of a node; None if the node does not run.

    Raises:
        LocalClusterError: When there is no such node.
    """
    folder = record.directory / "nodes" / name
    if name not in record.node_names():
        node_names = ", ".join(record.node_names()) or "none"
        raise LocalClusterError(f'cluster {record.name} has no node "{name}"; it has: {node_names}.')
    try:
        identity = ProcessIdentity.parse((folder / "process").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return identity if identity.alive() else None


def running(record: ClusterRecord, name: str) -> ProcessIdentity:
    """Return the first process of a running node.

    Raises:
        LocalClusterError: When the node does not run, or there is no such node.
    """
    identity = process(record, name)
    if identity is None:
        raise LocalClusterError(f"node {name} is down: boot it with `concertina local node start {name}`.")
    return identity


def kill(record: ClusterRecord, name: str) -> None:
    """Kill all processes of the node at the same time, as in a power failure. The API server gets no notice.

    Raises:
        LocalClusterError: When a process does not end.
    """
    remaining = processes.kill([running(record, name)])
    if remaining:
        raise LocalClusterError(f"node {name} does not end: its process {remaining[0].pid} hangs in the kernel.")


def stop(record: ClusterRecord, name: str) -> None:
    """Stop (SIGSTOP) all processes of the node, so that it does not respond. The node's connections stay open."""
    processes.signal_tree(running(record, name), signal.SIGSTOP)


def cont(record: ClusterRecord, name: str) -> None:
    """Continue (SIGCONT) the processes of a stopped node."""
    processes.signal_tree(running(record, name), signal.SIGCONT)
