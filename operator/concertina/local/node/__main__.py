"""Boot nodes: python -m concertina.local.node FOLDER... Each folder has a node's configuration, node.json.

Each node is a process tree below process 1 of a new pid namespace. The program records each node's identity (pid and
start time) in FOLDER/process before any part of the node runs. The program ends when all nodes have booted.

Process 1 of a node (the runtime) forks itself for every container. Forks of a small process are faster and need less
memory, so the program starts process 1 before it imports the kubelet's libraries. It forks the kubelets after the
import, so that they share the memory of the libraries.
"""

import gc
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from concertina.local.errors import LocalClusterError
from concertina.local.host import linux_namespaces
from concertina.local.host.processes import ProcessIdentity
from concertina.local.node.runtime import rootfs
from concertina.local.node.runtime.runtime_process import Runtime

_REFUSED = 3  # exit status: the message is on stderr


def main() -> int:
    """Boot all nodes. Return an exit status other than 0 if a node could not be booted."""
    links = {}
    for folder in map(Path, sys.argv[1:]):
        runtime_end, links[folder] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _close(links.values())
            os._exit(_boot(folder, runtime_end))
        runtime_end.close()
        _, status = os.waitpid(pid, 0)
        if status:
            # nodes that have booted end when this process closes its end of their link
            return os.waitstatus_to_exitcode(status)
    from concertina.local.node import kubelet

    gc.freeze()  # so that the collector does not write to shared memory
    for folder, link in links.items():
        pid = os.fork()
        if pid == 0:
            _close(peer_link for peer_link in links.values() if peer_link is not link)
            _join(folder)
            kubelet.main(folder, link)
        os.waitpid(pid, 0)
    return 0


def _close(links: Iterable[socket.socket]) -> None:
    """Close links (socket pairs between a runtime and a kubelet) that this process does not need.

    Each end of a link must be open in only one process. Otherwise the runtime would not notice when the kubelet ends.
    """
    for link in links:
        link.close()


def _boot(folder: Path, link: socket.socket) -> int:
    """Create the node's namespaces and fork the node's process 1. Return 0, or another status if that failed.

    Process 1 begins its work after the program has recorded its identity. The creation fails if the machine does not
    allow the namespaces.
    """
    os.setsid()
    try:
        linux_namespaces.enter_node()
    except LocalClusterError as error:
        print(error, file=sys.stderr)
        return _REFUSED
    recorded_read, recorded_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(recorded_write)
        if os.read(recorded_read, 1):
            _redirect(folder)
            rootfs.mount_proc()
            gc.freeze()
            Runtime(link).run()
        os._exit(1)
    (folder / "process").write_text(str(ProcessIdentity.of(pid)))
    os.write(recorded_write, b"1")
    return 0


def _join(folder: Path) -> None:
    """Fork a child into the node's namespaces. This function returns only in that child, which becomes the kubelet."""
    os.setsid()
    process = ProcessIdentity.parse((folder / "process").read_text()).pid
    flags = linux_namespaces.CLONE_NEWNS | linux_namespaces.CLONE_NEWPID
    if os.stat(f"/proc/{process}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino:
        flags |= linux_namespaces.CLONE_NEWUSER
    linux_namespaces.setns(os.pidfd_open(process), flags)
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)
    # the parent of the first process is outside of the namespace; the second one gets process 1 as its parent
    if os.fork():
        os._exit(0)
    _redirect(folder)


def _redirect(folder: Path) -> None:
    """Redirect standard input to /dev/null, and standard output and error to the node's log."""
    log = os.open(folder.parent.parent / "logs" / f"{folder.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open("/dev/null", os.O_RDONLY)
    for descriptor, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, descriptor)


if __name__ == "__main__":
    sys.exit(main())
