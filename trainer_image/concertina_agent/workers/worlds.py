"""Detection of workers that train in a process group of their own, separately from the round's other workers.

This happens if the worker's command starts a launcher such as torchrun. The agent sets RANK and WORLD_SIZE for each
worker, and the launcher sets other values for its own processes. The kernel shows these values in `/proc/PID/environ`.

A worker counts as training alone if all of these conditions are met (decision "Detection of workers that train alone"):

- A descendant of the worker was started with a RANK and with a smaller WORLD_SIZE than the round's.
- That process also has another rendezvous: its MASTER_ADDR, MASTER_PORT or TORCHELASTIC_RUN_ID differs. This excludes a
  script that runs its evaluation as a process with WORLD_SIZE=1, which changes only WORLD_SIZE.
- No other process of the worker is connected to the round's rendezvous. This excludes a script that trains in its round
  and starts torchrun for something else.

Variables that a process sets for itself can't be seen. mpirun can't be detected either, because it does not set these
variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Optional

from concertina_agent.workers.child_processes import children
from concertina_agent.workers.python_command import PythonCommand, Runs, parse
from concertina_protocol import Assign
from concertina_protocol.addresses import split

MOST_PROCESSES = 1000
"""Maximum number of processes of one worker to inspect."""
SOONEST_SECONDS, LATEST_SECONDS = 0.5, 60.0
"""Minimum and maximum seconds between two checks."""
ESTABLISHED, LISTEN = "01", "0A"
"""Codes of the states of a TCP socket in /proc/net/tcp."""
VSIZE = 20
"""Index of the size of virtual memory among the fields of /proc/PID/stat after the name."""


@dataclasses.dataclass(frozen=True)
class LaunchedWorld:
    """World that the environment variables of a process describe: rank, number of ranks, and rendezvous address."""

    rank: int
    size: int
    address: str
    port: str
    run_id: str

    def is_within(self, round: LaunchedWorld) -> bool:
        """Return whether this world has fewer ranks than the world `round`, and a different rendezvous address."""
        rendezvous, round_rendezvous = (self.address, self.port, self.run_id), (round.address, round.port, round.run_id)
        return 0 <= self.rank < self.size < round.size and rendezvous != round_rendezvous


def seconds_to_next_look(age: float) -> float:
    """Return the seconds until the next check. `age` is the number of seconds since the workers were started."""
    return min(LATEST_SECONDS, max(SOONEST_SECONDS, age / 10))


def world_of_round(assign: Assign) -> LaunchedWorld:
    """Return the LaunchedWorld that the environment variables of a round's workers describe.

    Its rank has no meaning.
    """
    address, port = split(assign.store)
    return LaunchedWorld(0, sum(member.workers for member in assign.members), address, str(port), assign.uid)


def alone(roots: Sequence[int], round: LaunchedWorld, before: str, proc: str = "/proc") -> str:
    """Return part of a sentence that says how a worker trains separately from the round's other workers, or "".

    The result is "" if the worker trains with the others, or if /proc does not show how it trains.

    Args:
        roots: Processes of the worker, without their descendants. A script in a fork of a warm parent is one of them.
        round: Size and rendezvous of the round.
        before: Result of the last check. It remains valid until the worker has joined the round's rendezvous, because
            the processes to which the text refers may have ended.
        proc: Folder of the proc file system.
    """
    parents = _descendants(roots, proc)
    # A fork of a warm parent shows the parent's variables, and so do the fork's own forks.
    shown = _world(roots[0], proc)
    own: dict[int, LaunchedWorld] = {}
    for pid, parent in parents.items():
        world = own.get(parent) or _world(pid, proc)
        if world is not None and world != shown and world.is_within(round):
            own[pid] = world
    if not own:
        return "" if before and _is_connected((*roots, *parents), round.port, proc) else before
    pid, world = next(iter(own.items()))
    # A launcher that was given the round's port serves a rendezvous of its own at this port.
    may_be_its_own = world.port == round.port and world.run_id != round.run_id
    other_pids = [pid for pid in (*roots, *parents) if pid not in own]
    if not may_be_its_own and _is_connected(other_pids, round.port, proc):
        return ""
    by = _name(parents[pid], proc)
    return f"processes with WORLD_SIZE={world.size} were started {by} in a round of {round.size} workers"


def _descendants(roots: Sequence[int], proc: str) -> dict[int, int]:
    """Return the parent of each descendant of the processes `roots`, keyed by descendant.

    Parents come before their children.
    """
    parents: dict[int, int] = {}
    waiting = [*roots]
    while waiting and len(parents) < MOST_PROCESSES:
        pid = waiting.pop(0)
        below = [child for child in children(pid, proc) if child not in parents]
        parents.update(dict.fromkeys(below, pid))
        waiting += below
    return parents


def _world(pid: int, proc: str) -> Optional[LaunchedWorld]:
    """Return the LaunchedWorld in the initial environment variables of a process, or None if there is none."""
    variables: Mapping[str, str] = {}
    with contextlib.suppress(OSError), open(f"{proc}/{pid}/environ", errors="replace") as file:
        variables = dict(line.partition("=")[::2] for line in file.read().split("\0"))
    try:
        rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return LaunchedWorld(rank, size, *(variables.get(name, "") for name in names))


def _is_connected(pids: Iterable[int], port: str, proc: str) -> bool:
    """Return whether one of the processes `pids` has a TCP socket that listens at `port` or is connected to it.

    If the kernel does not show the sockets, the result is True, so that no worker is reported wrongly.
    """
    try:
        sockets = set(_sockets_at(int(port), proc))
        return any(link in sockets for pid in pids for link in _open_files(pid, proc))
    except OSError:
        return True


def _sockets_at(port: int, proc: str) -> Iterator[str]:
    """Yield the TCP sockets at a port in this network namespace, in the form of the links in /proc/PID/fd.

    Raises OSError if the tables cannot be read.
    """
    for table in ("tcp", "tcp6"):
        if table == "tcp6" and not os.path.exists(f"{proc}/self/net/{table}"):
            continue  # a kernel without IPv6
        with open(f"{proc}/self/net/{table}") as file:
            for line in list(file)[1:]:
                _, local, remote, state, *_ = fields = line.split()
                ports = (int(endpoint.rpartition(":")[2], 16) for endpoint in (local, remote))
                if state in (ESTABLISHED, LISTEN) and port in ports:
                    yield f"socket:[{fields[9]}]"


def _open_files(pid: int, proc: str) -> Iterator[str]:
    """Yield the links of a process's open files. If the process has ended, there are none.

    Other kinds of OSError may be raised too.

    Raises:
        PermissionError: If the files of a running process may not be listed.
    """
    folder = f"{proc}/{pid}/fd"
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(f"{folder}/{name}")
    except (FileNotFoundError, ProcessLookupError):
        return
    except PermissionError:  # the kernel answers so for an ending process and a zombie, except to root
        if not _has_ended(pid, proc):
            raise


def _has_ended(pid: int, proc: str) -> bool:
    """Return whether a process is gone, or has released its memory, which is the first step of its exit."""
    try:
        with open(f"{proc}/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[VSIZE] == "0"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _name(pid: int, proc: str) -> str:
    """Return the name of the program that a process runs. For Python, it is the name of the script or module."""
    words: list[str] = []
    with contextlib.suppress(OSError), open(f"{proc}/{pid}/cmdline", errors="replace") as file:
        words = file.read().split("\0")[:-1]
    if not words:
        return "by a process that has ended"
    command = parse(words)
    if isinstance(command, PythonCommand) and command.runs is not Runs.CODE:
        return f"by {os.path.basename(command.target)}"
    return f"by {os.path.basename(words[0])}"
