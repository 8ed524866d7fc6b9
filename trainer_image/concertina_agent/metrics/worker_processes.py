"""Resource usage of the workers' processes, of the agent's own process, and of the pod's network.

All values are read from the kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Optional

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_PARENT, _GROUP, _UTIME, _THREADS, _STARTED, _RSS = 1, 2, 11, 17, 19, 21
"""Positions of the fields that are read from /proc/PID/stat, counted from the field after the command.

The four fields from _UTIME on are times: two of the process itself, and two of its child processes that have ended.
"""
MOST_PROCESSES = 10_000
"""Maximum number of processes to read. If the pod shares the host's process ids, all processes of the node are
visible."""


@dataclasses.dataclass(frozen=True)
class WorkerProcess:
    """A running worker."""

    local_rank: int
    rank: int
    pids: tuple[int, ...]
    """Ids of processes of the worker: the leader of its process group, and processes to which its scripts were moved.

    With a warm start, scripts run in forks of another process.
    """


@dataclasses.dataclass
class ProcessUsage:
    """Resource usage of one worker.

    Counters are sums over all workers with this local rank since the agent started.
    """

    rank: int
    cpu_seconds: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    resident_bytes: int = 0
    peak_bytes: int = 0
    threads: int = 0
    running: bool = False


@dataclasses.dataclass
class _Family:
    """Resource usage of one worker, summed over the processes that the worker consists of."""

    cpu: float = 0.0
    read: int = 0
    written: int = 0
    resident: int = 0
    peak: int = 0
    threads: int = 0


class WorkerProcesses:
    """Reader of the workers' resource usage. Call `look` repeatedly.

    The usage of a worker between the last reading and the worker's exit is not counted.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._uses: dict[int, ProcessUsage] = {}
        self._last: dict[int, tuple[tuple[int, int], _Family]] = {}
        """For each local rank, the last worker's process id and start time, and the worker's usage counted so far."""

    def look(self, workers: Iterable[WorkerProcess]) -> Mapping[int, ProcessUsage]:
        """Return the resource usage of the running workers, keyed by local rank."""
        for use in self._uses.values():
            use.running, use.resident_bytes, use.peak_bytes, use.threads = False, 0, 0, 0
        by_pid = {worker.pids[0]: worker for worker in workers}
        families, started = self._families(by_pid) if by_pid else ({}, {})
        for pid, now in families.items():
            if pid not in started:  # the worker has exited, and its child processes still run
                continue
            worker, process = by_pid[pid], (pid, started[pid])
            use = self._uses.setdefault(worker.local_rank, ProcessUsage(worker.rank))
            last_process, before = self._last.get(worker.local_rank, (process, _Family()))
            if last_process != process:
                before = _Family()
            use.cpu_seconds += max(0.0, now.cpu - before.cpu)
            use.read_bytes += max(0, now.read - before.read)
            use.written_bytes += max(0, now.written - before.written)
            # A sum falls when a child process ends and no process waits for it. The larger value remains counted.
            counted = dataclasses.replace(
                now,
                cpu=max(now.cpu, before.cpu),
                read=max(now.read, before.read),
                written=max(now.written, before.written),
            )
            self._last[worker.local_rank] = process, counted
            use.rank, use.running = worker.rank, True
            use.resident_bytes, use.peak_bytes, use.threads = now.resident, now.peak, now.threads
        return self._uses

    def _families(self, workers: Mapping[int, WorkerProcess]) -> tuple[dict[int, _Family], dict[int, int]]:
        """Return two mappings, keyed by the id of a worker's main process.

        The first contains the resource usage of each worker, summed over the worker's processes. The second contains
        the start time of each main process.
        """
        families: dict[int, _Family] = {pid: _Family() for pid in workers}
        started: dict[int, int] = {}
        names = [name for name in os.listdir(self._proc) if name.isdigit()]
        stats = {int(name): stat for name in names[:MOST_PROCESSES] if (stat := _stat(f"{self._proc}/{name}/stat"))}
        roots = {pid: leader for leader, worker in workers.items() for pid in worker.pids}
        for pid, stat in stats.items():
            leader = _leader(pid, stats, roots)
            if leader is None:
                continue
            if pid == leader:
                started[pid] = int(stat[_STARTED])
            family = families[leader]
            family.cpu += sum(map(int, stat[_UTIME : _UTIME + 4])) / _TICKS
            family.threads += int(stat[_THREADS])
            resident = int(stat[_RSS]) * _PAGE
            family.resident += resident
            family.peak += max(resident, _field(f"{self._proc}/{pid}/status", "VmHWM:") << 10)
            family.read += _field(f"{self._proc}/{pid}/io", "read_bytes:")
            family.written += _field(f"{self._proc}/{pid}/io", "write_bytes:")
        return families, started


def _leader(pid: int, stats: Mapping[int, Sequence[str]], roots: Mapping[int, int]) -> Optional[int]:
    """Return the id of the main process of the worker to which the process `pid` belongs, or None.

    A process belongs to a worker if the leader of the process's group, or of the group of one of its ancestors, is in
    `roots`. `stats` contains the fields of each process. `roots` maps each top-level process of a worker to the
    worker's main process.
    """
    seen: set[int] = set()
    while pid in stats and pid not in seen:
        seen.add(pid)
        group = int(stats[pid][_GROUP])
        if pid in roots or group in roots:
            return roots[pid] if pid in roots else roots[group]
        pid = int(stats[pid][_PARENT])
    return None


def own(proc: str = "/proc") -> tuple[float, int]:
    """Return two values of the agent's own process: its CPU time in seconds and its resident memory in bytes."""
    stat = _stat(f"{proc}/self/stat")
    return (sum(map(int, stat[_UTIME : _UTIME + 2])) / _TICKS, int(stat[_RSS]) * _PAGE) if stat else (0.0, 0)


def network(proc: str = "/proc") -> Optional[tuple[int, int]]:
    """Return the bytes that the pod has received and sent, without loopback, or None if they can't be read."""
    received = sent = 0
    try:
        with open(f"{proc}/self/net/dev") as file:
            for name, numbers in _devices(file):
                if name != "lo":
                    received, sent = received + int(numbers[0]), sent + int(numbers[8])
    except (OSError, ValueError, IndexError):
        return None
    return received, sent


def _devices(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    for line in lines:
        name, colon, numbers = line.partition(":")
        if colon:
            yield name.strip(), numbers.split()


def _stat(path: str) -> Optional[list[str]]:
    """Return the fields of a /proc/PID/stat file after the command, or None if the process has ended."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
        return fields if len(fields) > _RSS else None
    return None


def _field(path: str, name: str) -> int:
    """Return the value of a field of a /proc file, or 0 if it can't be read."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, errors="replace") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1])
    return 0
