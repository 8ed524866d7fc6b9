"""A parent that has imported what workers need, and forks them in milliseconds.

    python -m concertina_agent.workers.forkserver --control FD --preload MODULE...
    python -m concertina_agent.workers.forkserver --run MODULE:FUNCTION [ARGUMENT...]   (the same without a fork)

The agent and it share a SOCK_SEQPACKET socket, one JSON object a packet. It first says {"warm": true} or {"error":
sentence}. A request is {"run": "module:function", "arguments": [...], "environment": {...}} with the file descriptors
for stdout, stderr and what the arguments name ("fd:0" is the first after those two); the answer is {"pid": N}, or
{"unfit": why} (then the agent spawns instead). {"pid": N, "code": C} tells of each child's end.

It only imports: a tensor operation here would hang every child, and a second thread or an open GPU would make a fork
unsound, so both are looked for before each. A script's parent has this module too, and is waited for: what only the
bundled trainer's needs is imported where it is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Optional

from concertina_agent.workers.family import die_with_parent, exit_code

MAX_PACKET = 1 << 18
MAX_FDS = 8
STOPPING = (signal.SIGTERM, signal.SIGINT)


def unfit() -> str:
    """Why this process must not be forked; empty when it may."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"it has {threads} threads"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return f"it has opened {target}"
    return ""


def run_target(target: str, arguments: Sequence[Any]) -> int:
    """Call "module:function" with the arguments; its exit code, with a traceback on stderr where it raises."""
    module, _, name = target.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*arguments)
        code = result if isinstance(result, int) else 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def leave_parent(parent: int, environment: Mapping[str, str], fds: Sequence[int]) -> None:
    """In a new child: a session, output and environment of its own, default signals, death with its parent."""
    os.setsid()
    die_with_parent(parent)
    os.dup2(fds[0], 1)
    os.dup2(fds[1], 2)
    for fd in fds[:2]:
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    signal.set_wakeup_fd(-1)
    for number in (*STOPPING, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def become_worker(environment: Mapping[str, str]) -> None:
    """Of the bundled trainer: what is printed is seen at once, and the stacks can be asked for."""
    from concertina_agent.workers import stacks

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stacks.register(environment)


@dataclasses.dataclass(frozen=True)
class Forked:
    """What a new child was asked for."""

    request: Mapping[str, Any]
    fds: Sequence[int]
    """Beside those of stdout and stderr."""


def _refused() -> Mapping[str, str]:
    why = unfit()
    return {"unfit": why} if why else {}


class Forkserver:
    def __init__(self, control: socket.socket, refused: Callable[[], Mapping[str, str]] = _refused) -> None:
        """`refused`: the answer to a request, where this process must not be forked; empty where it may."""
        self._control, self._refused = control, refused
        self._wakeup, wake = socket.socketpair()
        for end in (self._wakeup, wake):
            end.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno())

    def serve(self) -> Optional[Forked]:
        """Returns in each child; and, with None, here once the agent closes its end."""
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup.recv(4096)
                    continue
                data, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET, MAX_FDS)
                if not data:
                    return None
                request = json.loads(data)
                if self._fork(request, fds):
                    selector.close()
                    return Forked(request, fds[2:])
                for fd in fds:
                    os.close(fd)
            self._reap()

    def send(self, message: Mapping[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    def _fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> bool:
        """Whether this is the child; the agent is answered."""
        refused = self._refused()
        if refused:
            self.send(refused)
            return False
        parent = os.getpid()
        # The child ignores them as this process does, until it has handlers of its own: what comes before waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.send({"pid": pid})
            return False
        try:
            for end in (self._control, self._wakeup, self._wake):
                end.close()
            leave_parent(parent, request["environment"], fds)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        return True

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.send({"pid": pid, "code": exit_code(status)})


def main(argv: Optional[Sequence[str]] = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="concertina_agent.workers.forkserver")
    parser.add_argument("--control", type=int)
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--preload", nargs="*", default=[])
    parser.add_argument("--run")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args(argv)
    if options.parent:
        die_with_parent(options.parent)
    if options.run:
        from concertina_agent.workers import stacks

        stacks.register(os.environ)
        _leave(run_target(options.run, [int(a) if a.isdigit() else a for a in options.arguments]))
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    server = Forkserver(socket.socket(fileno=options.control))
    try:
        for module in options.preload:
            importlib.import_module(module)
    except Exception as error:
        traceback.print_exc()
        server.send({"error": f"importing {module} failed: {type(error).__name__}: {error}"})
        return 1
    gc.collect()
    gc.freeze()
    server.send({"warm": True})
    forked = server.serve()
    return 0 if forked is None else _work(forked)


def _work(forked: Forked) -> NoReturn:
    """In a child, to its end."""
    code = 1
    try:
        request, fds = forked.request, forked.fds
        become_worker(request["environment"])
        arguments = [fds[int(a[3:])] if a.startswith("fd:") else a for a in request["arguments"]]
        code = run_target(request["run"], arguments)
    finally:
        os._exit(code)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
