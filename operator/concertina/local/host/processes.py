"""Processes, identified by pid and start time. The kernel may reuse a pid, so the pid alone is not unique."""

import errno
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# All processes of a cluster have this variable with the state folder. Pods do not, because their environment is clean.
MARKER = "CONCERTINA_LOCAL_CLUSTER"
# Not the ports of kubelets, agents and NodePorts. In the host's network, agents listen on all addresses at the ports
# 12000 to 19999 (kube.manifests.agent_container): one of them could take the port of a component that is restarted.
_PORTS = range(20000, 29000)


@dataclass(frozen=True)
class ProcessIdentity:
    """Unique identity of a process: its pid, and its start time in clock ticks since the boot of the machine."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Return the identity of the process with this pid; None if there is none or it is a zombie."""
        stat = _stat(pid)
        return cls(pid, int(stat[19])) if stat and stat[0] not in "ZX" else None

    @classmethod
    def parse(cls, text: str) -> "ProcessIdentity":
        pid, start = text.split()
        return cls(int(pid), int(start))

    def __str__(self) -> str:
        return f"{self.pid} {self.start}"

    def alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still exists.

        A pid is not reused in the microseconds between the check and the signal.
        """
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat that follow the process name; None if there is no such process.

    The name is left out, because it may contain any text.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def marked(directory: Path) -> list[ProcessIdentity]:
    """Return all live processes of the local cluster whose state folder is `directory`, except those of pods.

    Processes of a state folder inside `directory` are included, for example those of an S3 server.
    """
    needle = f"{MARKER}={directory}".encode()
    below = needle + b"/"
    identities = []
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # gone, or of another user
            continue
        is_marked = any(entry == needle or entry.startswith(below) for entry in environment)
        if is_marked and (identity := ProcessIdentity.of(pid)):
            identities.append(identity)
    return identities


def container(environment: dict[str, str]) -> ProcessIdentity | None:
    """Return the first process of the container that was started with the given environment variables.

    The result is None if there is no such process. Containers of all local clusters of this user are searched.
    """
    expected_entries = {f"{name}={value}".encode() for name, value in environment.items()}
    for pid in _pids():
        try:
            process_entries = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            if expected_entries <= process_entries and _namespace_pids(pid)[-1] == 1:
                return ProcessIdentity.of(pid)
        except (OSError, IndexError):  # gone, or of another user
            continue
    return None


def _namespace_pids(pid: int) -> list[int]:
    """Return the pid of a process in each of its pid namespaces, the outermost first."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [int(word) for line in lines if line.startswith("NSpid:") for word in line.split()[1:]]


def descendants(root: int) -> list[int]:
    """Return the pids of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat:
            children.setdefault(int(stat[1]), []).append(pid)
    pids, queue = [], [root]
    while queue:
        pid = queue.pop()
        pids.append(pid)
        queue += children.get(pid, [])
    return pids


def signal_tree(root: ProcessIdentity, number: int) -> None:
    """Send a signal to a process and all its descendants. Repeat until no new process has appeared."""
    done: set[int] = set()
    while root.alive():
        fresh = [pid for pid in descendants(root.pid) if pid not in done]
        if not fresh:
            return
        for pid in fresh:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        done.update(fresh)


def kill(processes: Iterable[ProcessIdentity], timeout: float = 30.0) -> list[ProcessIdentity]:
    """Send SIGKILL to the processes and wait until they have ended (or are zombies).

    Return the processes that still exist after `timeout` seconds.
    """
    remaining = list(processes)
    for process in remaining:
        process.signal(signal.SIGKILL)
    deadline = time.monotonic() + timeout
    while remaining and time.monotonic() < deadline:
        remaining = [process for process in remaining if process.alive()]
        if remaining:
            time.sleep(0.005)
    return remaining


def can_listen(address: str, port: int) -> bool:
    """Return whether no other process listens on the port, on this address or on all addresses.

    Remaining connections of a process that has ended don't matter.

    Raises:
        OSError: When the address cannot be used.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def free_ports(address: str, count: int) -> list[int]:
    """Return TCP ports on which no process listens.

    The ports are lower than those that the kernel uses for outgoing connections. A program that is killed and started
    again can therefore use its ports again.

    Raises:
        OSError: When the address cannot be used.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = secrets.choice(_PORTS)  # processes with the same seed of `random` would choose the same ports
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                ports.add(port)
    return list(ports)
