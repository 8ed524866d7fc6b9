"""Hand-over of a script from a Python interpreter that has just started to a fork of a warm parent.

A warm parent is a process that has already imported the script's modules. The start hook calls `run` in the interpreter
(`hook`). The interpreter sends one packet to the agent, with a description of itself and its open files. The answer is
one of these:

    {"record": PATH or "", ...}   The script starts in this process, which records its imports in that file. If a fork
                                  has refused to take over the script, the answer also contains the reason as "plain",
                                  and the interpreter sends this reason to the agent.
    {"pid": N, "group": G}        The script runs in process N, a fork of a warm parent. This process joins group G and
                                  represents process N: it forwards signals to N, and ends in the same way when the
                                  agent sends {"code": C}. The program that has started this process therefore sees
                                  how the script ended.

If an interpreter runs an installed program, such as `accelerate launch`, it keeps the environment variable VARIABLE.
The scripts of its child processes are then handed over too. Any other interpreter removes the variable.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from concertina_agent.workers.learned import PACKAGES, Recorder

VARIABLE = "CONCERTINA_WARM_SOCKET"
"""Environment variable by which an interpreter finds the agent: NUMBER:PATH.

NUMBER is the number of a worker's start, and PATH is the path of the agent's socket. In the child processes of a
launcher, LAUNCHED precedes the value.
"""
LAUNCHED = "launched:"
MAX_PACKET = 1 << 18
MOST_FILES = 250
FORWARDED = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}


def run(value: str, initial_modules: Iterable[str]) -> None:
    """Hand this interpreter's script over to another process, which has imported the script's modules already.

    If the script has to start in this process instead, this function returns. Otherwise it waits for the script's end,
    and ends this process with the same exit code or signal.

    Args:
        value: Value of VARIABLE.
        initial_modules: Modules that were imported before those of this package.
    """
    address, record = value.removeprefix(LAUNCHED), ""
    if address == value or _runs_file_or_module():
        if _is_installed():
            os.environ[VARIABLE] = LAUNCHED + address
        start, _, path = address.partition(":")
        with contextlib.suppress(OSError, ValueError):
            record = _asked(int(start), path)
    if record:
        sys.meta_path.insert(0, Recorder(record))
    for name in set(sys.modules).difference(initial_modules):
        del sys.modules[name]


def interpreter() -> dict[str, Any]:
    """Return properties of this Python interpreter, such as its version and flags.

    A forked process can take over this interpreter's script only if it has the same properties.
    """
    return {
        "executable": sys.executable,
        "prefix": [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix],
        "version": sys.version,
        "flags": list(sys.flags),
        "sys.path": list(sys.path),
    }


def _asked(start: int, path: str) -> str:
    """Send a description of this interpreter to the agent, and act on the answer. Return the path for recorded imports.

    The result is the path of the file in which this interpreter records its imports, or "" if it must not record them.

    The function returns only if the script has to start in this process.

    Raises:
        OSError: If the agent cannot be reached.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.connect(path)
        files = _inherited_files()
        report = {
            "start": start,
            "line": _command_line(),
            "arguments": sys.argv[1:],
            "target": sys.argv[0] if sys.argv else "",
            "interpreter": interpreter(),
            "directory": os.getcwd(),
            "environment": dict(os.environ),
            "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            "files": files,
            # The process itself reads this file, because others may lack the permission (ptrace_access_mode in
            # ptrace(2)).
            "personality": read_text("/proc/self/personality"),
        }
        socket.send_fds(agent, [json.dumps(report).encode()], files)
        answer = json.loads(agent.recv(MAX_PACKET) or b"{}")
        if "pid" in answer:
            _stand_in(agent, answer["pid"], answer["group"], files)
        if "plain" in answer:
            agent.send(json.dumps({"plain": answer["plain"]}).encode())
        return str(answer.get("record", ""))


def read_text(path: str) -> str:
    """Return the text of a file, or an empty string if it cannot be read."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return ""


def _runs_file_or_module() -> bool:
    return bool(sys.argv) and sys.argv[0] not in ("", "-", "-c")


def _is_installed() -> bool:
    """Return whether this interpreter runs an installed program.

    An installed program is a module of an installed package, or a script beside the interpreter.
    """
    target = sys.argv[0] if sys.argv else ""
    if target == "-m":
        word = _command_line()[-len(sys.argv)]
        name = word.partition("-m")[2] or word
        spec = importlib.machinery.PathFinder.find_spec(name.partition(".")[0], sys.path)
        return spec is not None and any(f"/{folder}/" in (spec.origin or "") for folder in PACKAGES)
    folders = {os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin")}
    return os.path.dirname(os.path.abspath(target)) in folders


def _command_line() -> list[str]:
    with open("/proc/self/cmdline", "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]


def _inherited_files() -> list[int]:
    """Return the descriptors of the files that this process has inherited from its parent."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself is closed by now
            if os.get_inheritable(int(name)):
                numbers.append(int(name))
    return sorted(numbers)


def _stand_in(agent: socket.socket, pid: int, group: int, files: Iterable[int]) -> NoReturn:
    """Represent process `pid`, which runs the script: forward signals to it, and end in the same way when it ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    # A signal to this process's group reaches the script directly, because the script is in the same group.
    with contextlib.suppress(OSError):
        os.setpgid(0, group)
    for number in FORWARDED:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, lambda number, _: _forward(pid, number))
    _release(files)
    signal.pthread_sigmask(signal.SIG_SETMASK, before - FORWARDED)
    data = b""
    with contextlib.suppress(OSError):
        data = agent.recv(MAX_PACKET)
    end_like(json.loads(data)["code"] if data else -signal.SIGKILL)


def _forward(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _release(files: Iterable[int]) -> None:
    """Close the inherited files in this process.

    Afterwards, only the script has a pipe open, so the pipe's reader sees the end when the script closes the pipe.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for file in files:
        if file <= 2:
            os.dup2(null, file)
        else:
            os.close(file)


def end_like(code: int) -> NoReturn:
    """End this process with an exit code, or by a signal if the code is negative. This process writes no core dump."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
        code = 128 - code
    os._exit(code)
