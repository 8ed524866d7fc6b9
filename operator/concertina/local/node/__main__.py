"""Boot of nodes: python -m concertina.local.node FOLDER... (one folder with node.json per node, see NodeConfig).

Each node becomes a process tree below process 1 of a new pid namespace. This process ends when all nodes have booted.
It writes the identity of each node (pid and start time) to FOLDER/process before any part of the node runs.

Process 1, the runtime, is forked before the kubelet's libraries are imported, because it is forked again for every
container, which is faster with less memory. The kubelets are forked after the import, so that they share its memory.
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
    """Boot all nodes, and return an exit status that is not 0 when one of them could not be booted."""
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
            return os.waitstatus_to_exitcode(status)  # booted nodes end when this process closes its end of their link
    from concertina.local.node import kubelet

    gc.freeze()  # shared memory stays shared
    for folder, link in links.items():
        pid = os.fork()
        if pid == 0:
            _close(peer_link for peer_link in links.values() if peer_link is not link)
            _join(folder)
            kubelet.main(folder, link)
        os.waitpid(pid, 0)
    return 0


def _close(links: Iterable[socket.socket]) -> None:
    """Close links that this process does not need.

    A link must have one holder at each end. Otherwise its runtime does not notice when the kubelet is gone.
    """
    for link in links:
        link.close()


def _boot(folder: Path, link: socket.socket) -> int:
    """Create the node's namespaces and fork its process 1, which waits until its identity is recorded."""
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
    """Fork a child into the node's namespaces, below its process 1. Only that child returns."""
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
    if os.fork():  # the first process inside has a parent outside; the second one's parent becomes process 1
        os._exit(0)
    _redirect(folder)


def _redirect(folder: Path) -> None:
    """Redirect the input to /dev/null and the output to the node's log."""
    log = os.open(folder.parent.parent / "logs" / f"{folder.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open("/dev/null", os.O_RDONLY)
    for descriptor, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, descriptor)


if __name__ == "__main__":
    sys.exit(main())
