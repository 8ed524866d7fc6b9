"""Warm parent: a process that has imported the modules that workers need, and forks workers in milliseconds.

    python -m concertina_agent.workers.forkserver --control FD --preload MODULE...
    python -m concertina_agent.workers.forkserver --run MODULE:FUNCTION [ARGUMENT...]   (the same without a fork)

The agent and the parent communicate over a SOCK_SEQPACKET socket. Each packet is one JSON object:
- The parent first sends {"warm": true} or {"error": sentence}.
- A request of the agent is {"run": "module:function", "arguments": [...], "environment": {...}}. Its packet also has
  the file descriptors for stdout and stderr, and those that the arguments name ("fd:0" is the first of them).
- The answer is {"pid": N}, or {"unfit": why} if the parent must not be forked. The agent then starts an ordinary
  process instead.
- When a child ends, the parent sends {"pid": N, "code": C}.

The parent only imports modules. A tensor operation in the parent would make every child hang. A second thread or an
open GPU would make a fork unsafe, so the parent checks for both before each fork.

The warm parent of a user's script imports this module too, and workers wait for this import. Modules that only the
bundled trainer's parent needs are therefore imported where they are used.
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
MAX_FDS = 253
"""Maximum number of file descriptors in one packet (SCM_MAX_FD of include/net/scm.h)."""
STOPPING = (signal.SIGTERM, signal.SIGINT)


def unfit() -> str:
    """Return the reason why this warm process must not fork now, or "" if it may fork."""
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
    """Call the function "module:function" with the arguments, and return the exit code for this process.

    If the function raises an exception, a traceback is printed on stderr.
    """
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
    """Set up a new process that was forked from a warm process.

    The new process gets its own process group, output files and environment variables, and the default handling of
    signals. The kernel kills the new process when the warm process dies.
    """
    os.setpgid(0, 0)
    die_with_parent(parent)
    os.dup2(fds[0], 1)
    os.dup2(fds[1], 2)
    for fd in fds[:2]:
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    reset_signals()


def reset_signals() -> None:
    """Restore the default actions of signals, in a process that was forked from a warm process."""
    signal.set_wakeup_fd(-1)
    for number in (*STOPPING, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def become_worker(environment: Mapping[str, str]) -> None:
    """Set up a process as a worker of the bundled trainer.

    The process's output is flushed at each line, and the agent can request the process's stacks.
    """
    from concertina_agent.workers import stacks

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stacks.register(environment)


@dataclasses.dataclass(frozen=True)
class Forked:
    """The agent's request that a forked child process must carry out."""

    request: Mapping[str, Any]
    fds: Sequence[int]
    """File descriptors that came with the request, without those for stdout and stderr."""


def _refused() -> Mapping[str, str]:
    why = unfit()
    return {"unfit": why} if why else {}


class Forkserver:
    """Server in a warm process, which has imported the workers' modules. It forks workers on request."""

    def __init__(self, control: socket.socket, refused: Callable[[], Mapping[str, str]] = _refused) -> None:
        """Prepare to serve the agent's requests.

        Args:
            control: Socket that is connected to the agent.
            refused: Function that returns an empty mapping if this process may fork now. Otherwise it returns the
                answer to the agent's request, with the reason.
        """
        self._control, self._refused = control, refused
        self._wakeup, wake = socket.socketpair()
        for end in (self._wakeup, wake):
            end.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno())

    def serve(self) -> Optional[Forked]:
        """Serve the agent's requests to fork workers.

        In each forked child, the method returns the request that the child has to run. In the warm process itself, it
        returns None when the agent closes the socket.
        """
        selector = selectors.PollSelector()  # PollSelector has no file descriptor, which a child would have to close
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
                if self._handle(request, fds):
                    selector.close()
                    return Forked(request, fds[2:])
                for fd in fds:
                    os.close(fd)
            self._reap()

    def send(self, message: Mapping[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    def _handle(self, request: Mapping[str, Any], fds: Sequence[int]) -> bool:
        """Fork a child for a request, and answer the agent. Return whether this process is the child."""
        refused = self._refused()
        if refused:
            self.send(refused)
            return False
        parent = os.getpid()
        # In the child, these signals stay pending until it has its own handlers. Otherwise it would ignore them, as
        # this process does.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.send({"pid": pid})
            return False
        try:
            for end in (self._control, self._wakeup, self._wake):
                end.close()
            self._leave(parent, request, fds)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        return True

    def _leave(self, parent: int, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Set up the process group, output files and environment variables of a new child."""
        leave_parent(parent, request["environment"], fds)

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
    gc.disable()  # It takes a fifth of the time of torch's imports, and frees little.
    try:
        for module in options.preload:
            importlib.import_module(module)
    except Exception as error:
        traceback.print_exc()
        server.send({"error": f"importing {module} failed: {type(error).__name__}: {error}"})
        return 1
    gc.collect()
    gc.freeze()
    gc.enable()
    server.send({"warm": True})
    forked = server.serve()
    return _leave(0) if forked is None else _work(forked)  # An ordinary exit takes a second to take torch apart.


def _work(forked: Forked) -> NoReturn:
    """Run the request in a child, and end the child with the exit code."""
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
