"""Hand-over of a starting interpreter to a warm process, from the interpreter's side (called by `hook`).

The interpreter sends one packet to the agent: a description of itself, with its open files. The answer is one of these:

{"record": PATH or "", ...}   the script starts here, and records its imports in that file
{"pid": N}                    the script runs in process N. This process stays as its stand-in: it forwards signals, and
                              ends as {"code": C} says, so that whatever has started it sees the script's own end
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from concertina_agent.workers.learned import Recorder

MAX_PACKET = 1 << 18
MOST_FILES = 250
"""Maximum number of files in one packet (SCM_MAX_FD is 253)."""
FORWARDED = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}


def run(path: str, initial_modules: Iterable[str]) -> None:
    """Return if the script starts in this process; otherwise wait for the script's end, and end like it.

    Args:
        path: Socket of the agent.
        initial_modules: Modules that were imported before those of this package.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    answer: dict[str, Any] = {}
    files: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.connect(path)
        files = _inherited_files()
        report = {
            "line": _command_line(),
            "arguments": sys.argv[1:],
            "target": sys.argv[0] if sys.argv else "",
            "interpreter": interpreter(),
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "mask": sorted(map(int, before)),
            "files": files,
        }
        socket.send_fds(server, [json.dumps(report).encode()], files)
        answer = json.loads(server.recv(MAX_PACKET) or b"{}")
    if "pid" in answer:
        _stand_in(server, answer["pid"], files)
    server.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if answer.get("record"):
        sys.meta_path.insert(0, Recorder(answer["record"]))
    for name in set(sys.modules).difference(initial_modules):
        del sys.modules[name]


def interpreter() -> dict[str, Any]:
    """Return the properties in which an interpreter must equal the warm process."""
    return {
        "executable": sys.executable,
        "prefix": [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix],
        "version": sys.version,
        "flags": list(sys.flags),
        "sys.path": list(sys.path),
    }


def _command_line() -> list[str]:
    with open("/proc/self/cmdline", "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]


def _inherited_files() -> list[int]:
    """Return the file descriptors that this process has inherited."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder itself is closed by now
            if os.get_inheritable(int(name)):
                numbers.append(int(name))
    return sorted(numbers)


def _stand_in(server: socket.socket, pid: int, files: Iterable[int]) -> NoReturn:
    """Forward signals to the script's process, and end as it ends."""
    # Signals to the group of this process reach the script directly, since it is in that group, too.
    with contextlib.suppress(OSError):
        os.setpgid(0, os.getsid(0))
    for number in FORWARDED:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, lambda number, _: _forward(pid, number))
    _release(files)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    data = b""
    with contextlib.suppress(OSError):
        data = server.recv(MAX_PACKET)
    end_like(json.loads(data)["code"] if data else -signal.SIGKILL)


def _forward(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _release(files: Iterable[int]) -> None:
    """Close the inherited files, so that the reader of a pipe sees its end when the script closes it."""
    null = os.open(os.devnull, os.O_RDWR)
    for file in files:
        if file <= 2:
            os.dup2(null, file)
        else:
            os.close(file)


def end_like(code: int) -> NoReturn:
    """End this process with an exit code, or by a signal if the code is negative, without a core dump of its own."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
        code = 128 - code
    os._exit(code)
