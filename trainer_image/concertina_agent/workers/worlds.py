"""Find workers that train in a world of their own instead of the round's, below a launcher such as torchrun.

The agent sets RANK and WORLD_SIZE for each worker. A launcher that the worker's command starts sets others for its own
processes, which the kernel shows in `/proc/PID/environ`. A worker counts as alone if all of this holds (decision "A
world of its own shows in a child's variables"):

- A process below it was started with RANK and WORLD_SIZE of a smaller world than the round's.
- That process was given another rendezvous, too: MASTER_ADDR, MASTER_PORT or TORCHELASTIC_RUN_ID differ. A script that
  runs its evaluation as a process with WORLD_SIZE=1 changes only the size.
- No other process of the worker is connected to the round's own rendezvous. A script that trains with its round may
  start torchrun for something else.

Variables that a process sets for itself do not show, nor does mpirun, which leaves these variables alone.
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
"""Maximum number of processes of one worker that are inspected."""
SOONEST_SECONDS, LATEST_SECONDS = 0.5, 60.0
"""Minimum and maximum time between two checks in seconds."""
ESTABLISHED, LISTEN = "01", "0A"
"""States in /proc/net/tcp."""
VSIZE = 20
"""Index of the size of the virtual memory among the fields of /proc/PID/stat that follow the name."""


@dataclasses.dataclass(frozen=True)
class LaunchedWorld:
    """The world that a process's variables name."""

    rank: int
    size: int
    address: str
    port: str
    run_id: str

    def is_within(self, round: LaunchedWorld) -> bool:
        """Return whether this is a smaller world than the round's, with another rendezvous."""
        rendezvous, round_rendezvous = (self.address, self.port, self.run_id), (round.address, round.port, round.run_id)
        return 0 <= self.rank < self.size < round.size and rendezvous != round_rendezvous


def seconds_to_next_look(age: float) -> float:
    """Return the time until the next check; `age` is the time since the workers were started, both in seconds."""
    return min(LATEST_SECONDS, max(SOONEST_SECONDS, age / 10))


def world_of_round(assign: Assign) -> LaunchedWorld:
    """Return the world of a round. Its rank has no meaning."""
    address, port = split(assign.store)
    return LaunchedWorld(0, sum(member.workers for member in assign.members), address, str(port), assign.uid)


def alone(roots: Sequence[int], round: LaunchedWorld, before: str, proc: str = "/proc") -> str:
    """Return a clause that says how a worker trains alone, or an empty string if it does not, as far as can be seen.

    Args:
        roots: Processes of the worker that are not below each other, such as a script that runs in a fork of a warm
            parent.
        round: World of the round.
        before: Clause of the last check. It stays until the worker joins its round's rendezvous, because the processes
            that it describes may have ended.
        proc: Folder of the proc file system.
    """
    parents = _descendants(roots, proc)
    # A fork of the warm process shows that process's variables, and so do forks of the worker.
    shown = _world(roots[0], proc)
    own: dict[int, LaunchedWorld] = {}
    for pid, parent in parents.items():
        world = own.get(parent) or _world(pid, proc)
        if world is not None and world != shown and world.is_within(round):
            own[pid] = world
    if not own:
        return "" if before and _is_connected((*roots, *parents), round.port, proc) else before
    pid, world = next(iter(own.items()))
    # A launcher that was told to use the round's port serves its own rendezvous there.
    may_be_its_own = world.port == round.port and world.run_id != round.run_id
    other_pids = [pid for pid in (*roots, *parents) if pid not in own]
    if not may_be_its_own and _is_connected(other_pids, round.port, proc):
        return ""
    by = _name(parents[pid], proc)
    return f"processes with WORLD_SIZE={world.size} were started {by} in a round of {round.size} workers"


def _descendants(roots: Sequence[int], proc: str) -> dict[int, int]:
    """Return the parent of each process below these; parents come first."""
    parents: dict[int, int] = {}
    waiting = [*roots]
    while waiting and len(parents) < MOST_PROCESSES:
        pid = waiting.pop(0)
        below = [child for child in children(pid, proc) if child not in parents]
        parents.update(dict.fromkeys(below, pid))
        waiting += below
    return parents


def _world(pid: int, proc: str) -> Optional[LaunchedWorld]:
    """Return the world that the initial variables of a process name, or None if they name none."""
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
    """Return whether one of these processes has a TCP socket at that port, or to it; True if that cannot be seen."""
    try:
        sockets = set(_sockets_at(int(port), proc))
        return any(link in sockets for pid in pids for link in _open_files(pid, proc))
    except OSError:
        return True


def _sockets_at(port: int, proc: str) -> Iterator[str]:
    """Yield the sockets of this network namespace as links in /proc/PID/fd name them.

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
    """Yield the links of a process's open files, or none if it has ended.

    Raises other kinds of OSError too.

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
    except PermissionError:  # the kernel's answer to all but root for a process that is ending, and for a zombie
        if not _has_ended(pid, proc):
            raise


def _has_ended(pid: int, proc: str) -> bool:
    """Return whether a process is gone, or has released its memory, which is the first step of its end."""
    try:
        with open(f"{proc}/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[VSIZE] == "0"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _name(pid: int, proc: str) -> str:
    """Return what a process runs, without arguments: its program, or the script or module that its Python runs."""
    words: list[str] = []
    with contextlib.suppress(OSError), open(f"{proc}/{pid}/cmdline", errors="replace") as file:
        words = file.read().split("\0")[:-1]
    if not words:
        return "by a process that has ended"
    command = parse(words)
    if isinstance(command, PythonCommand) and command.runs is not Runs.CODE:
        return f"by {os.path.basename(command.target)}"
    return f"by {os.path.basename(words[0])}"
