"""Resource usage of the workers' processes, of this process, and of the pod's network, as the kernel reports it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Optional

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_SESSION, _UTIME, _THREADS, _STARTED, _RSS = 3, 11, 17, 19, 21
"""Positions of fields in /proc/PID/stat after the command.

Four fields start at _UTIME: own times, and those of children that were waited for.
"""
MOST_PROCESSES = 10_000
"""Maximum number of processes that are read. With the host's process ids, all processes of the node are visible."""


@dataclasses.dataclass(frozen=True)
class WorkerProcess:
    """A running worker, whose process leads a session that contains its child processes."""

    local_rank: int
    rank: int
    pid: int


@dataclasses.dataclass
class ProcessUsage:
    """Usage of one worker at this moment; counters sum all workers with its local rank since the agent started."""

    rank: int
    cpu_seconds: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    resident_bytes: int = 0
    peak_bytes: int = 0
    threads: int = 0
    running: bool = False


@dataclasses.dataclass
class _Session:
    """Sums over the processes of one session."""

    cpu: float = 0.0
    read: int = 0
    written: int = 0
    resident: int = 0
    peak: int = 0
    threads: int = 0


class WorkerProcesses:
    """Usage of the workers, which is read repeatedly.

    Usage between the last reading and a worker's end is not counted.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._uses: dict[int, ProcessUsage] = {}
        self._last: dict[int, tuple[tuple[int, int], _Session]] = {}
        """Last process and its counted usage, by local rank."""

    def look(self, workers: Iterable[WorkerProcess]) -> Mapping[int, ProcessUsage]:
        """Return the usage by local rank."""
        for use in self._uses.values():
            use.running, use.resident_bytes, use.peak_bytes, use.threads = False, 0, 0, 0
        by_pid = {worker.pid: worker for worker in workers}
        sessions, started = self._sessions(by_pid.keys()) if by_pid else ({}, {})
        for pid, now in sessions.items():
            if pid not in started:  # the worker has ended, and its child processes still run
                continue
            worker, process = by_pid[pid], (pid, started[pid])
            use = self._uses.setdefault(worker.local_rank, ProcessUsage(worker.rank))
            last_process, before = self._last.get(worker.local_rank, (process, _Session()))
            if last_process != process:
                before = _Session()
            use.cpu_seconds += max(0.0, now.cpu - before.cpu)
            use.read_bytes += max(0, now.read - before.read)
            use.written_bytes += max(0, now.written - before.written)
            # A sum can fall when a process ends that no other process waits for. The counted usage stays counted.
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

    def _sessions(self, pids: Iterable[int]) -> tuple[dict[int, _Session], dict[int, int]]:
        """Return the sums of the sessions that these processes lead, and the start time of each leader."""
        sessions: dict[int, _Session] = {pid: _Session() for pid in pids}
        started: dict[int, int] = {}
        names = [name for name in os.listdir(self._proc) if name.isdigit()]
        for name in names[:MOST_PROCESSES]:
            stat = _stat(f"{self._proc}/{name}/stat")
            session = sessions.get(int(stat[_SESSION])) if stat else None
            if stat is None or session is None:
                continue
            if int(name) in sessions:
                started[int(name)] = int(stat[_STARTED])
            session.cpu += sum(map(int, stat[_UTIME : _UTIME + 4])) / _TICKS
            session.threads += int(stat[_THREADS])
            resident = int(stat[_RSS]) * _PAGE
            session.resident += resident
            session.peak += max(resident, _field(f"{self._proc}/{name}/status", "VmHWM:") << 10)
            session.read += _field(f"{self._proc}/{name}/io", "read_bytes:")
            session.written += _field(f"{self._proc}/{name}/io", "write_bytes:")
        return sessions, started


def own(proc: str = "/proc") -> tuple[float, int]:
    """Return the processor seconds and resident bytes of this process."""
    stat = _stat(f"{proc}/self/stat")
    return (sum(map(int, stat[_UTIME : _UTIME + 2])) / _TICKS, int(stat[_RSS]) * _PAGE) if stat else (0.0, 0)


def network(proc: str = "/proc") -> Optional[tuple[int, int]]:
    """Return the bytes received and sent since the pod's network was created, without loopback, or None on an error."""
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
    """Return the fields after the command, or None if the process has ended."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
        return fields if len(fields) > _RSS else None
    return None


def _field(path: str, name: str) -> int:
    """Return the value of a field, or 0 if it is missing or not readable."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, errors="replace") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1])
    return 0
