"""Start of the processes of a state folder, and stop of all of them together, whichever program started them."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from concertina.local.errors import LocalClusterError
from concertina.local.host import paths, processes
from concertina.local.host.processes import MARKER, ProcessIdentity
from concertina.local.state import record as state

_TIMEOUT = 30.0  # seconds
_HOST = "host"  # the file that says on which machine


def spawn(folder: Path, name: str, command: list[str]) -> ProcessIdentity:
    """Start a program in its own session. Its output goes to logs/NAME.log, and its identity to NAME.process.

    Raises:
        LocalClusterError: When the program ends immediately, or the folder belongs to another machine.
    """
    only_here(folder)
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    (folder / _HOST).write_text(socket.gethostname())
    with open(logs / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | {MARKER: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    process.returncode = 0  # no process waits for it, because it outlives this process
    identity = ProcessIdentity.of(process.pid)
    if identity is None:
        raise LocalClusterError(f"{name} ended at once; see {logs / name}.log")
    # For a moment, the kernel shows the new program without the environment by which `processes.marked` finds it.
    with contextlib.suppress(OSError):  # it has ended
        while identity.alive() and not Path(f"/proc/{process.pid}/environ").read_bytes():
            time.sleep(0.001)
    (folder / f"{name}.process").write_text(str(identity))
    return identity


def find(folder: Path, name: str) -> ProcessIdentity | None:
    """Return the process that was started under `name` in this state folder; None if it does not run."""
    try:
        identity = ProcessIdentity.parse((folder / f"{name}.process").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return identity if identity.alive() else None


def only_here(folder: Path) -> None:
    """Check that a state folder's cluster is on this machine. Several machines may share a home directory.

    Processes of another machine can't be seen here, so a cluster there would seem to be stopped. If only this machine's
    name has changed, its processes are still found.

    Raises:
        LocalClusterError: When the cluster is on another machine.
    """
    try:
        host = (folder / _HOST).read_text()
    except FileNotFoundError:
        return
    cut_off = not host  # the machine lost power during the write
    if not cut_off and host != socket.gethostname() and not processes.marked(folder):
        raise LocalClusterError(
            f"{folder} belongs to a cluster on {host}: use it and take it down there. If it no longer runs "
            "there, delete the folder."
        )


def tear_down(folder: Path) -> None:
    """Kill all processes of a state folder, then delete its files except the logs.

    Raises:
        LocalClusterError: When a process does not end, or the folder belongs to another machine.
    """
    only_here(folder)
    deadline = time.monotonic() + _TIMEOUT
    while marked_processes := [candidate for candidate in processes.marked(folder) if candidate.pid != os.getpid()]:
        remaining = processes.kill(marked_processes)
        if remaining or time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in remaining or marked_processes)
            raise LocalClusterError(f"processes {pids} do not end because they hang in the kernel.")
    for litter in (*folder.glob("litter"), *folder.glob("*/litter")):  # paths outside the folder, a line each
        for line in litter.read_text().splitlines():
            Path(line).unlink(missing_ok=True)
    _keep_logs(folder)
    for path in folder.iterdir() if folder.exists() else ():
        if path.name != "logs":
            _delete(path)


def _keep_logs(folder: Path) -> None:
    """Move the logs of nodes, of their containers and of the S3 server to the folder with the other logs."""
    patterns = ("nodes/*/node.log", "nodes/*/pods/*/containers/*/*.log", "*/logs/*.log")
    for log in (path for pattern in patterns for path in folder.glob(pattern)):
        name_parts = [
            part for part in log.relative_to(folder).parts if part not in ("nodes", "pods", "containers", "logs")
        ]
        (folder / "logs").mkdir(exist_ok=True)
        log.rename(folder / "logs" / "-".join(name_parts))


def forget(name: str) -> None:
    """Delete the logs of a cluster that `end` has stopped. The logs are the last files of the cluster."""
    shutil.rmtree(state.directory(name), ignore_errors=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Context manager that keeps other commands from setting up or tearing down the same cluster."""
    with state.locked(paths.clusters() / f".{name}.lock"):
        yield


@contextlib.contextmanager
def sole_owner(name: str) -> Iterator[None]:
    """Context manager for the owner of a cluster, with which the cluster ends. Other commands can't own it meanwhile.

    Raises:
        LocalClusterError: When another running command owns the cluster.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(state.locked(paths.clusters() / f".{name}.owner", wait=False))
        except BlockingIOError:
            raise LocalClusterError(
                f"cluster {name} belongs to another running command: end that command, or choose another name."
            ) from None
        yield


def end(name: str) -> None:
    """Stop a cluster and delete its files except the logs. The cluster need not exist."""
    with alone(name):
        tear_down(state.directory(name))


@contextlib.contextmanager
def guarded(name: str) -> Iterator[None]:
    """Context manager that tears down a local cluster when the block ends.

    If this process is killed before that, a guardian process tears the cluster down.
    """
    only_here(state.directory(name))
    command = [sys.executable, "-m", "concertina.local.state.guardian", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guardian:
        try:
            yield
        finally:
            end(name)
            if guardian.stdin:
                guardian.stdin.close()
