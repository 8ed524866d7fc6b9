"""Processes by identity: a pid alone may be reused, a pid with its start time is not."""

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

# Every process of a cluster carries its state folder in this variable; pods do not (their environment is clean).
MARKER = "CONCERTINA_LOCAL_CLUSTER"
_PORTS = range(12000, 29000)  # no kubelet's, agent's or NodePort


@dataclass(frozen=True)
class ProcessIdentity:
    """One process for all time: its pid and its start time in clock ticks since boot."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """The process that has this pid now, None when there is none or it is a zombie."""
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
        """Send a signal unless the process is gone (no pid is reused in the microseconds between look and kill)."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on (the name before it may hold anything)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def marked(directory: Path) -> list[ProcessIdentity]:
    """All live processes of the cluster with this state folder (or of one in it), pods excepted."""
    needle = f"{MARKER}={directory}".encode()
    below = needle + b"/"
    found = []
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # gone, or of another user
            continue
        ours = any(entry == needle or entry.startswith(below) for entry in environment)
        if ours and (identity := ProcessIdentity.of(pid)):
            found.append(identity)
    return found


def container(environment: dict[str, str]) -> ProcessIdentity | None:
    """Process 1 of the container (of any cluster of this user) that was started with these variables, if one runs."""
    wanted = {f"{name}={value}".encode() for name, value in environment.items()}
    for pid in _pids():
        try:
            held = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            if wanted <= held and _namespace_pids(pid)[-1] == 1:
                return ProcessIdentity.of(pid)
        except (OSError, IndexError):  # gone, or of another user
            continue
    return None


def _namespace_pids(pid: int) -> list[int]:
    """Its pid in each pid namespace that it is in, the outermost first."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [int(word) for line in lines if line.startswith("NSpid:") for word in line.split()[1:]]


def descendants(root: int) -> list[int]:
    """The pids of root and of everything below it."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat:
            children.setdefault(int(stat[1]), []).append(pid)
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += children.get(pid, [])
    return found


def signal_tree(root: ProcessIdentity, number: int) -> None:
    """Send a signal to root and all below it, again until no new process turns up (they may fork meanwhile)."""
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
    """SIGKILL them and wait until they are gone (or zombies); returns those that are not after timeout seconds."""
    left = list(processes)
    for process in left:
        process.signal(signal.SIGKILL)
    deadline = time.monotonic() + timeout
    while left and time.monotonic() < deadline:
        left = [process for process in left if process.alive()]
        if left:
            time.sleep(0.005)
    return left


def free_ports(address: str, count: int) -> list[int]:
    """TCP ports on which nothing listens, below those that the kernel gives to whoever connects: what is killed and
    started again finds its own still free. Raises OSError."""
    found: set[int] = set()
    while len(found) < count:
        port = secrets.choice(_PORTS)  # whoever has seeded `random` would find the same ones as others who did
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                found.add(port)
    return list(found)
