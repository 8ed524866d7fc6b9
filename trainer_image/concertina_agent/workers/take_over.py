"""Take-over of an interpreter's script by a fork of a warm parent, a process that has already imported the modules.

`script_parent` calls `take_over` in the fork. The fork assumes the interpreter's properties: working directory, process
group, umask, limits, priority, CPU affinity, signals, arguments, environment variables, and all inherited files with
their numbers. Then the fork answers the interpreter, and Python runs the script in the fork. If the fork cannot assume
a property, the interpreter runs the script itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from concertina_agent.workers.hand_over import FORWARDED, read_text

SAME = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
"""Fields of /proc/PID/status that a process cannot change.

A fork can only take over the script of an interpreter if these fields are equal in both processes.
"""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
KINDS = {"stdin": stat.S_IFCHR, "stdout": stat.S_IFIFO, "stderr": stat.S_IFIFO}
"""File types (see stat) that the standard files had when Python created `sys.stdin`, `sys.stdout` and `sys.stderr`."""
HIGH = 256
"""File descriptors from this number on are used for received files until these get their own numbers."""


class Unlike(RuntimeError):
    """Error that a fork cannot assume a property of the interpreter whose script it should run.

    The error's text is the end of a sentence.
    """


@dataclasses.dataclass(frozen=True)
class Signals:
    """Signals that an interpreter ignores, and those that it blocks."""

    ignored: tuple[int, ...]
    blocked: tuple[int, ...]

    def apply(self) -> None:
        for number in self.ignored:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def take_over(report: Mapping[str, Any], parent: int, fds: Sequence[int]) -> Signals:
    """Take over the script of an interpreter: assume its properties, and tell it that this process runs the script.

    The caller must apply the returned signals after it has restored Python's own signal handlers. If the take-over
    fails, this function tells the interpreter to run the script itself, and ends this process.

    Args:
        report: The interpreter's description of itself (see `hand_over`). Its entry "record" is the path of the file in
            which to record imports.
        parent: Process id of the warm parent.
        fds: File descriptors of the interpreter's socket, and of the files that it has inherited.
    """
    interpreter, *files = map(_raised, fds)
    try:
        _become(report)
        signals = Signals(_ignored(report["pid"]), tuple(report["mask"]))
        _take_files(dict(zip(report["files"], files)))
        _take_streams()
    except Exception as error:
        why = str(error) if isinstance(error, Unlike) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError), socket.socket(fileno=interpreter) as socket_:
            socket_.send(json.dumps({"record": report["record"], "plain": why}).encode())
        os._exit(0)
    with socket.socket(fileno=interpreter) as socket_:
        socket_.send(json.dumps({"pid": os.getpid(), "group": parent}).encode())
    return signals


def _ignored(pid: int) -> tuple[int, ...]:
    """Return the signals that a process ignores, without those that Python always ignores."""
    mask = int(_status(pid)["SigIgn"], 16)
    return tuple(number for number in FORWARDED - IGNORED_BY_PYTHON if mask >> (number - 1) & 1)


def _become(report: Mapping[str, Any]) -> None:
    """Assume the properties of the interpreter that `report` describes, such as its working directory and limits.

    The function `_take_files` takes over the interpreter's open files.

    Raises:
        Unlike: If this process cannot assume a property.
    """
    pid = report["pid"]
    status = _status(pid)
    _check(pid, status)
    if report["personality"] != read_text("/proc/self/personality"):
        raise Unlike("its execution domain (personality) differs")
    for number in report["files"]:
        if number > 2 and os.path.lexists(f"/proc/self/fd/{number}"):
            raise Unlike(f"the warm process uses the file descriptor {number} itself")
    try:
        os.setpgid(0, os.getpgid(pid))
        os.chdir(f"/proc/{pid}/cwd")
        os.umask(int(status["Umask"], 8))
        _take_limits(pid)
    except (OSError, ValueError) as error:
        raise Unlike(f"its limits or its process group can't be set in the warm process ({error})") from error
    os.environ.clear()
    os.environ.update(report["environment"])
    sys.argv[1:] = report["arguments"]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = report["line"]


def _check(pid: int, status: Mapping[str, str]) -> None:
    own = _status(os.getpid())
    for name in SAME:
        if status.get(name) != own.get(name):
            raise Unlike(f"its {name} in /proc/PID/status differs")
    for name in NAMESPACES:
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
                raise Unlike(f"it is in another {name} namespace")
    for name in ("root", "exe"):
        if os.readlink(f"/proc/{pid}/{name}") != os.readlink(f"/proc/self/{name}"):
            raise Unlike(f"its /proc/PID/{name} differs")
    if read_text(f"/proc/{pid}/cgroup") != read_text("/proc/self/cgroup"):
        raise Unlike("its cgroup differs")
    if _memory_policy(pid) != _memory_policy(os.getpid()):
        raise Unlike("its NUMA memory policy differs")
    if os.getsid(pid) != os.getsid(0):
        raise Unlike("it is in its own session")


def _take_limits(pid: int) -> None:
    for limit in LIMITS:
        if (given := resource.prlimit(pid, limit)) != resource.getrlimit(limit):
            resource.setrlimit(limit, given)
    if (policy := os.sched_getscheduler(pid)) != os.sched_getscheduler(0):
        os.sched_setscheduler(0, policy, os.sched_getparam(pid))
    if (nice := os.getpriority(os.PRIO_PROCESS, pid)) != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    if (adjustment := read_text(f"/proc/{pid}/oom_score_adj")) != read_text("/proc/self/oom_score_adj"):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(adjustment)


def _take_files(received: Mapping[int, int]) -> None:
    """Give each open file from the interpreter the same file descriptor number as in the interpreter.

    `received` maps each number in the interpreter to the descriptor under which this process has received the file.
    """
    for number in range(3):
        if number not in received:
            with contextlib.suppress(OSError):
                os.close(number)
    for number, file in received.items():
        os.dup2(file, number)
        os.close(file)


def _raised(file: int) -> int:
    """Move an open file to a free file descriptor that is at least HIGH, and return that descriptor."""
    import fcntl

    high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(file)
    return high


def _take_streams() -> None:
    """Create `sys.stdin`, `sys.stdout` and `sys.stderr` again for the files that were taken over.

    A stream is kept if its file has the same type (KINDS) as when Python created the stream, because the stream then
    has the right buffering.
    """
    for number, (name, kind) in enumerate(KINDS.items()):
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            stream = None
        else:
            stream = getattr(sys, name)
            if stat.S_IFMT(mode) == kind and not os.isatty(number):
                continue
            stream = _stream(number, stream)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(number: int, before: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a text stream for a standard file, created as Python does at its start (create_stdio in pylifecycle.c)."""
    buffered = not isinstance(before.buffer, io.RawIOBase)
    mode = "rb" if number == 0 else "wb"
    buffer: Any = open(number, mode, -1 if buffered else 0, closefd=False)  # noqa: SIM115
    (buffer.raw if buffered else buffer).name = before.name
    by_line = before.line_buffering or (buffered and os.isatty(number))
    stream: Any = io.TextIOWrapper(
        buffer, before.encoding, before.errors, "\n", line_buffering=by_line, write_through=before.write_through
    )
    stream.mode = mode[0]
    return stream  # type: ignore[no-any-return]


def _status(pid: int) -> dict[str, str]:
    lines = read_text(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _memory_policy(pid: int) -> str:
    """Return the NUMA policy of a process's memory, or "" if the kernel has no NUMA support."""
    words: list[str] = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/numa_maps") as file:
        words = file.readline().split()  # one line is enough, and reading all takes a while
    return words[1] if len(words) > 1 else ""
