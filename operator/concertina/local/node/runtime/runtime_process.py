"""Process 1 of a node, which forks containers and reports their ends, as containerd and its shims do.

This process is the init process of the node's pid namespace, so killing it kills all processes of the node at the same
time. It has no threads, so it can fork safely. The kubelet communicates with it over a socket pair that preserves
message boundaries.

A request contains its kind (Launch or Execution) and carries two descriptors: a memory file with the request as JSON,
and the output of the new process. The responses are events: `started` or `failed`, and `exited` some time after
`started`.
"""

import array
import contextlib
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

from concertina.local.host import linux_namespaces
from concertina.local.node.runtime import rootfs

_CONTAINER = linux_namespaces.CLONE_NEWNS | linux_namespaces.CLONE_NEWUTS | linux_namespaces.CLONE_NEWIPC


@dataclass(frozen=True)
class Launch:
    """Request to start a container.

    Paths are those of the machine, except for cwd, which is a path in the container.
    """

    id: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    hostname: str
    mounts: list[rootfs.Mount]
    gpus: bool
    """True if the container can use the machine's GPUs."""


@dataclass(frozen=True)
class Execution:
    """Request to run a command in a running container.

    `pid` is the container's process 1, in the node's pid namespace.
    """

    id: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    pid: int


@dataclass(frozen=True)
class ProcessEvent:
    """Event that the runtime reports: started (value: pid), failed (text: reason) or exited (value: wait status)."""

    kind: str
    id: str
    value: int = 0
    text: str = ""


def send_request(link: socket.socket, request: Launch | Execution, output: int) -> None:
    """Request a new process with `output` as its stdout and stderr. The caller may close `output` afterwards."""
    body = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        os.write(body, json.dumps(asdict(request)).encode())
        rights = array.array("i", [body, output])
        link.sendmsg([type(request).__name__.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    finally:
        os.close(body)


def receive_event(link: socket.socket) -> ProcessEvent | None:
    """Return the next event; None if the runtime has ended."""
    data = link.recv(65536)
    return ProcessEvent(**json.loads(data)) if data else None


class Runtime:
    """Forks processes on request, waits for its children, and reports their ends."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._ids: dict[int, str] = {}
        self._starting: dict[int, int] = {}  # pid: its status pipe
        self._selector = selectors.DefaultSelector()
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def run(self) -> None:
        """Process requests until the kubelet ends.

        This process then ends too, and the kernel kills all other processes of the node.
        """
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write)
        self._selector.register(self._link, selectors.EVENT_READ, self._serve)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda: self._reap(wake_read))
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map():  # an earlier event in this batch may have unregistered it
                    key.data()

    def _report(self, event: ProcessEvent) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._link.send(json.dumps(asdict(event)).encode())

    def _serve(self) -> None:
        kind, descriptors, _, _ = socket.recv_fds(self._link, 64, 2)
        if not kind:  # the kubelet is gone
            os._exit(0)
        body, output = descriptors
        with open(body, "rb") as file:
            file.seek(0)
            request = json.loads(file.read())
        request["mounts"] = [rootfs.Mount(**mount) for mount in request.get("mounts", [])]
        if kind == b"Launch":
            launch = Launch(**request)
            self._fork(launch.id, lambda: _become_container(launch), output, new_pid_namespace=True)
        else:
            request.pop("mounts")
            execution = Execution(**request)
            self._fork(execution.id, lambda: _become_execution(execution), output, new_pid_namespace=False)

    def _fork(self, identity: str, become: Callable[[], NoReturn], output: int, *, new_pid_namespace: bool) -> None:
        """Fork a child process that calls `become`.

        Parent and child share a status pipe. A child that succeeds closes the pipe without writing to it. A child that
        fails writes the reason into the pipe.
        """
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        if new_pid_namespace:
            linux_namespaces.unshare(linux_namespaces.CLONE_NEWPID)  # for the next child
        pid = os.fork()
        if pid == 0:
            _child(become, output, status_write)
        if new_pid_namespace:
            linux_namespaces.setns(self._pid_namespace, linux_namespaces.CLONE_NEWPID)
        os.close(status_write)
        os.close(output)
        self._ids[pid] = identity
        self._starting[pid] = status_read
        self._selector.register(status_read, selectors.EVENT_READ, lambda: self._launched(pid))

    def _launched(self, pid: int) -> None:
        status = self._starting.pop(pid)
        reason = os.read(status, 4096).decode()
        self._selector.unregister(status)
        os.close(status)
        if reason:
            # the end of such a process is not reported
            self._report(ProcessEvent("failed", self._ids.pop(pid), text=reason))
        else:
            self._report(ProcessEvent("started", self._ids[pid], value=pid))

    def _reap(self, wake: int) -> None:
        os.read(wake, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._starting:  # report the start before the end
                self._launched(pid)
            if pid in self._ids:
                self._report(ProcessEvent("exited", self._ids.pop(pid), value=status))


def _child(become: Callable[[], NoReturn], output: int, status: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDONLY)
        for descriptor, source in ((0, null), (1, output), (2, output)):
            os.dup2(source, descriptor)
        os.setsid()
        become()
    except BaseException as error:
        os.write(status, f"{type(error).__name__}: {error}"[:4000].encode())
    os._exit(127)


def _become_container(launch: Launch) -> NoReturn:
    linux_namespaces.unshare(_CONTAINER)
    linux_namespaces.sethostname(launch.hostname)
    rootfs.RootFileSystem(launch.gpus).build(launch.mounts)
    rootfs.mount_proc()
    _execute(launch.argv, launch.env, launch.cwd)


def _become_execution(execution: Execution) -> NoReturn:
    target = os.pidfd_open(execution.pid)
    linux_namespaces.setns(target, _CONTAINER | linux_namespaces.CLONE_NEWPID)
    inside = os.fork()
    if inside:
        os.closerange(1, 1 << 16)  # the status pipe and the output belong to the inner process
        _, status = os.waitpid(inside, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    linux_namespaces.die_with_parent()  # the parent is killed after a time-out
    _execute(execution.argv, execution.env, execution.cwd)


def _execute(argv: list[str], env: dict[str, str], cwd: str) -> NoReturn:
    os.makedirs(cwd, exist_ok=True)
    os.chdir(cwd)
    try:
        os.execvpe(argv[0], argv, env)
    except FileNotFoundError:
        raise FileNotFoundError(f'exec: "{argv[0]}": executable file not found in $PATH') from None
