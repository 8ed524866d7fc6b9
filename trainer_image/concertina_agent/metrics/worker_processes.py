"""What the kernel knows of the workers' processes, of this one, and of the pod's network."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Optional

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_SESSION, _UTIME, _THREADS, _STARTED, _RSS = 3, 11, 17, 19, 21
"""Places in /proc/PID/stat behind the command. At _UTIME stand four: own time, and that of children waited for."""
MOST_PROCESSES = 10_000
"""That are looked at: with the host's process ids all of the node's are there."""


@dataclasses.dataclass(frozen=True)
class WorkerProcess:
    """One that runs; its process leads a session, in which its own children are."""

    local_rank: int
    rank: int
    pid: int


@dataclasses.dataclass
class ProcessUsage:
    """Of one worker at this moment; what is counted, since the agent began, over all who had its place."""

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
    """Sums over the processes of one."""

    cpu: float = 0.0
    read: int = 0
    written: int = 0
    resident: int = 0
    peak: int = 0
    threads: int = 0


class WorkerProcesses:
    """Looked at, time and again. What a worker used after the last look before its end is not seen."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._uses: dict[int, ProcessUsage] = {}
        self._last: dict[int, tuple[tuple[int, int], _Session]] = {}
        """By place: which process it was, and what had been counted of it."""

    def look(self, workers: Iterable[WorkerProcess]) -> Mapping[int, ProcessUsage]:
        """By local rank."""
        for use in self._uses.values():
            use.running, use.resident_bytes, use.peak_bytes, use.threads = False, 0, 0, 0
        by_pid = {worker.pid: worker for worker in workers}
        sessions, started = self._sessions(by_pid.keys()) if by_pid else ({}, {})
        for pid, now in sessions.items():
            if pid not in started:  # it has ended, and what it started lives on
                continue
            worker, process = by_pid[pid], (pid, started[pid])
            use = self._uses.setdefault(worker.local_rank, ProcessUsage(worker.rank))
            known, before = self._last.get(worker.local_rank, (process, _Session()))
            if known != process:
                before = _Session()
            use.cpu_seconds += max(0.0, now.cpu - before.cpu)
            use.read_bytes += max(0, now.read - before.read)
            use.written_bytes += max(0, now.written - before.written)
            # A sum can fall when a process ends that nobody waits for: what was counted stays counted.
            most = dataclasses.replace(
                now,
                cpu=max(now.cpu, before.cpu),
                read=max(now.read, before.read),
                written=max(now.written, before.written),
            )
            self._last[worker.local_rank] = process, most
            use.rank, use.running = worker.rank, True
            use.resident_bytes, use.peak_bytes, use.threads = now.resident, now.peak, now.threads
        return self._uses

    def _sessions(self, pids: Iterable[int]) -> tuple[dict[int, _Session], dict[int, int]]:
        """Of these leaders, and when each of them was started."""
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
    """Processor seconds and resident bytes of this process."""
    stat = _stat(f"{proc}/self/stat")
    return (sum(map(int, stat[_UTIME : _UTIME + 2])) / _TICKS, int(stat[_RSS]) * _PAGE) if stat else (0.0, 0)


def network(proc: str = "/proc") -> Optional[tuple[int, int]]:
    """Bytes received and sent since the pod's network was made, without loopback; None where that can't be read."""
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
    """What stands behind the command; None where the process is gone."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
        return fields if len(fields) > _RSS else None
    return None


def _field(path: str, name: str) -> int:
    """0 where it is not there, or may not be read."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, errors="replace") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1])
    return 0
