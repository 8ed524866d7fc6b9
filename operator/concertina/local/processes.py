"""Processes by identity: a pid alone may be reused, a pid with its start time is not."""

import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

# Every process of a cluster carries its state folder in this variable; pods do not (their environment is clean).
MARKER = "CONCERTINA_LOCAL_CLUSTER"


@dataclass(frozen=True)
class Identity:
    """One process for all time: its pid and its start time in clock ticks since boot."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "Identity | None":
        """The process that has this pid now, None when there is none or it is a zombie."""
        stat = _stat(pid)
        return cls(pid, int(stat[19])) if stat and stat[0] not in "ZX" else None

    @classmethod
    def parse(cls, text: str) -> "Identity":
        pid, start = text.split()
        return cls(int(pid), int(start))

    def __str__(self) -> str:
        return f"{self.pid} {self.start}"

    def alive(self) -> bool:
        return Identity.of(self.pid) == self

    def signal(self, number: int) -> None:
        """Send a signal unless the process is gone. (No pid is reused within the microseconds between look and kill.)"""
        if self.alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on (the name before it may hold anything)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def marked(directory: Path) -> list[Identity]:
    """All live processes of the cluster with this state folder, pods excepted."""
    needle = f"{MARKER}={directory}".encode()
    found = []
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # gone, or of another user
            continue
        identity = Identity.of(pid) if needle in environment else None
        if identity:
            found.append(identity)
    return found


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


def signal_tree(root: Identity, number: int) -> None:
    """Send a signal to root and all below it, again and again until no new process turns up (one may fork meanwhile)."""
    done: set[int] = set()
    while root.alive():
        fresh = [pid for pid in descendants(root.pid) if pid not in done]
        if not fresh:
            return
        for pid in fresh:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        done.update(fresh)


def kill(processes: Iterable[Identity], timeout: float = 30.0) -> list[Identity]:
    """SIGKILL them and wait until they are gone (a zombie counts as gone); returns those that are not within the timeout, in seconds."""
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
    """TCP ports on which nothing listens, chosen by the kernel."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((address, 0))
        return [each.getsockname()[1] for each in sockets]
