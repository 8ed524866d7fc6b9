"""Launch of a command whose interpreter hands itself over, from the warm side.

A fork of the warm parent launches the command as a child, in a process group of its own within the fork's session. When
an interpreter of that command hands itself over, the fork forks once more: that process takes over the interpreter's
files, environment, limits and process group, and runs its script. Only a process of the same session can join the
group.

The agent and the fork share a SOCK_SEQPACKET socket. {"launch": [WORD...], "environment": {...}} is answered by
{"launched": PID} or {"error": sentence}; a description from `hand_over`, with the interpreter's own socket and its
files, is answered on that socket. The fork ends as the command ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from concertina_agent.workers.family import die_with_parent, exit_code
from concertina_agent.workers.hand_over import FORWARDED, MAX_PACKET, MOST_FILES, end_like

SAME = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
"""Lines of /proc/PID/status that one process cannot take over from another."""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
KINDS = {"stdin": stat.S_IFCHR, "stdout": stat.S_IFIFO, "stderr": stat.S_IFIFO}
"""Kind of each standard file of the parent, for which Python has made its streams."""
HIGH = 256
"""File descriptor from which received files are kept until they get their own numbers."""


class Host:
    """Fork of the warm parent that launches a command, and forks the processes in which its scripts run."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._stand_ins: dict[int, socket.socket] = {}
        """Socket of the interpreter for which each process runs."""
        self._wakeup, self._wake = socket.socketpair()
        for end in (self._wakeup, self._wake):
            end.setblocking(False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno())
        self._command = 0
        """Process id of the command."""

    def serve(self) -> dict[str, Any]:
        """Launch the command. Return in each process that runs a script, with the interpreter's description."""
        while True:
            listened = [self._control, self._wakeup, *self._stand_ins.values()]
            ready, _, _ = select.select(listened, [], [])
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
                self._reap()
            for pid, stand_in in list(self._stand_ins.items()):
                if stand_in in ready:  # it never writes: it was killed
                    _kill(pid)
                    self._stand_ins.pop(pid).close()
            if self._control in ready:
                data, files, _, _ = socket.recv_fds(self._control, MAX_PACKET, MOST_FILES + 1)
                for file in files:
                    os.set_inheritable(file, False)
                if not data:
                    os._exit(1)  # the agent has ended
                message = json.loads(data)
                if "launch" in message:
                    self._launch(message["launch"], message["environment"])
                elif self._fork(message, files):
                    return message

    def _launch(self, line: Sequence[str], environment: Mapping[str, str]) -> None:
        read, write = os.pipe()
        host = os.getpid()
        self._command = os.fork()
        if self._command == 0:
            try:
                os.setpgid(0, 0)
                die_with_parent(host)
                self._leave()
                for number in IGNORED_BY_PYTHON:
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(line[0], list(line), dict(environment))
            except OSError as error:
                os.write(write, (error.strerror or str(error)).encode())
            finally:
                os._exit(127)
        os.close(write)
        with open(read, "rb") as answer:
            why = answer.read().decode()
        self._control.send(json.dumps({"error": why} if why else {"launched": self._command}).encode())

    def _leave(self) -> None:
        """Undo, in a child, what only this process needs."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for end in (self._control, self._wakeup, self._wake, *self._stand_ins.values()):
            end.close()

    def _fork(self, report: dict[str, Any], files: Sequence[int]) -> bool:
        """Fork a process that takes over an interpreter; return whether this process is that one."""
        stand_in, control, host = socket.socket(fileno=files[0]), self._control.dup(), os.getpid()
        pid = os.fork()
        if pid:
            self._stand_ins[pid] = stand_in
            control.close()
            for file in files[1:]:
                os.close(file)
            return False
        try:
            die_with_parent(host)
            self._leave()
            take_over(report, files[1:], stand_in)
        except BaseException as error:
            # The interpreter still waits, and starts its script itself.
            why = f"{type(error).__name__}: {error}" if not isinstance(error, Unlike) else str(error)
            with contextlib.suppress(OSError):
                control.send(json.dumps({"plain": why}).encode())
                stand_in.send(json.dumps({"record": ""}).encode())
            os._exit(0)
        control.close()
        return True

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._command:
                    end_like(exit_code(status))
                if (stand_in := self._stand_ins.pop(pid, None)) is not None:
                    with contextlib.suppress(OSError):
                        stand_in.send(json.dumps({"code": exit_code(status)}).encode())
                    stand_in.close()


class Unlike(RuntimeError):
    """Error for an interpreter that this process cannot take over; its text is a clause."""


def take_over(report: dict[str, Any], files: Sequence[int], stand_in: socket.socket) -> None:
    """Make this process equal to an interpreter, and tell that interpreter to stand in for it.

    Raises:
        Unlike: If it cannot be made equal.
    """
    pid = report["pid"]
    status = _status(pid)
    _check(pid, status)
    _check_files(report["files"], {*files, stand_in.fileno()})
    report["ignored"] = _ignored(status)
    try:
        os.setpgid(0, os.getpgid(pid))
        os.chdir(f"/proc/{pid}/cwd")
        os.umask(int(status["Umask"], 8))
        _take_limits(pid)
    except (OSError, ValueError) as error:
        raise Unlike(f"its limits or its process group can't be taken over ({error})") from error
    os.environ.clear()
    os.environ.update(report["environment"])
    sys.argv[1:] = report["arguments"]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = report["line"]
    high = _raised(stand_in.detach())
    _take_files(dict(zip(report["files"], files)))
    _take_streams()
    stand_in = socket.socket(fileno=high)
    stand_in.send(json.dumps({"pid": os.getpid()}).encode())
    stand_in.close()


def take_signals(report: Mapping[str, Any]) -> None:
    """Ignore and block the signals that an interpreter ignores and blocks."""
    for number in report["ignored"]:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, report["mask"])


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
    for name, what in (("cgroup", "its cgroup"), ("personality", "its personality")):
        if _read(f"/proc/{pid}/{name}") != _read(f"/proc/self/{name}"):
            raise Unlike(f"{what} differs")
    if _memory_policy(pid) != _memory_policy(os.getpid()):
        raise Unlike("its NUMA memory policy differs")
    if os.getsid(pid) != os.getsid(0):
        raise Unlike("it has a session of its own")


def _take_limits(pid: int) -> None:
    for limit in LIMITS:
        if (given := resource.prlimit(pid, limit)) != resource.getrlimit(limit):
            resource.setrlimit(limit, given)
    if (policy := os.sched_getscheduler(pid)) != os.sched_getscheduler(0):
        os.sched_setscheduler(0, policy, os.sched_getparam(pid))
    if (nice := os.getpriority(os.PRIO_PROCESS, pid)) != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    if (adjustment := _read(f"/proc/{pid}/oom_score_adj")) != _read("/proc/self/oom_score_adj"):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(adjustment)


def _check_files(numbers: Sequence[int], received: set[int]) -> None:
    for number in numbers:
        if number > 2 and number not in received and os.path.lexists(f"/proc/self/fd/{number}"):
            raise Unlike(f"the warm process has a file of its own at number {number}")


def _take_files(received: Mapping[int, int]) -> None:
    """Give each received file its number."""
    raised = {number: _raised(file) for number, file in received.items()}
    for number in range(3):
        if number not in raised:
            with contextlib.suppress(OSError):
                os.close(number)
    for number, file in raised.items():
        os.dup2(file, number)
        os.close(file)


def _raised(file: int) -> int:
    """Return a high number for a file in place of its own."""
    import fcntl

    high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(file)
    return high


def _take_streams() -> None:
    """Make the standard streams anew where the kind of their file differs from the one that the parent has."""
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
    """Return a stream of the standard file with this number, as Python makes it (create_stdio in pylifecycle.c)."""
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
    lines = _read(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _ignored(status: Mapping[str, str]) -> list[int]:
    """Return the signals that a process ignores, but for those that Python always ignores."""
    mask = int(status["SigIgn"], 16)
    return [number for number in FORWARDED - IGNORED_BY_PYTHON if mask >> (number - 1) & 1]


def _memory_policy(pid: int) -> str:
    """Return the NUMA policy of a process's memory, or an empty string on a kernel without NUMA."""
    words = _read(f"/proc/{pid}/numa_maps").partition("\n")[0].split()
    return words[1] if len(words) > 1 else ""


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
