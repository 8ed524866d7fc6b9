"""Boot nodes: python -m concertina.local.node FOLDER...   (one folder with node.json per node, see NodeConfig).

Each node becomes a process tree below process 1 of a new pid namespace; this process ends when all are booted.
It writes each one's identity (pid and start time) to FOLDER/process before anything of the node runs.
"""

import asyncio
import gc
import json
import logging
import os
import socket
import sys
from pathlib import Path

from concertina.local import namespaces
from concertina.local.errors import LocalClusterError
from concertina.local.node import rootfs
from concertina.local.node.kubelet import Kubelet
from concertina.local.node.node import NodeConfig
from concertina.local.node.runtime import Runtime
from concertina.local.node.runtime_client import RuntimeClient
from concertina.local.processes import Identity

_REFUSED = 3  # exit status: the sentence is on stderr


def main() -> int:
    """Boot all nodes; the exit status is that of the first that could not be."""
    gc.freeze()  # containers are forked from here: what is shared stays shared
    booting = []
    for folder in map(Path, sys.argv[1:]):
        pid = os.fork()
        if pid == 0:
            os._exit(_boot(folder))
        booting.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in booting]
    return max(statuses, default=0)


def _boot(folder: Path) -> int:
    """Make the node's namespaces and fork its process 1, which waits until its identity is on record."""
    os.setsid()
    try:
        namespaces.enter_node()
    except LocalClusterError as error:
        print(error, file=sys.stderr)
        return _REFUSED
    recorded_read, recorded_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(recorded_write)
        if os.read(recorded_read, 1):
            _init(folder)
        os._exit(1)
    identity = Identity.of(pid)
    (folder / "process").write_text(str(identity))
    os.write(recorded_write, b"1")
    return 0


def _init(folder: Path) -> None:
    """Process 1 of the node: the runtime, with the kubelet as its first child."""
    log = os.open(folder / "node.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open("/dev/null", os.O_RDONLY)
    for descriptor, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, descriptor)
    rootfs.mount_proc()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kubelet = os.fork()
    if kubelet == 0:
        ours.close()
        _kubelet(folder, theirs)
    theirs.close()
    Runtime(ours, kubelet).run()


def _kubelet(folder: Path, link: socket.socket) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = NodeConfig(**json.loads((folder / "node.json").read_text()))
    try:
        asyncio.run(_serve(config, folder, link))
    finally:
        os._exit(1)


async def _serve(config: NodeConfig, folder: Path, link: socket.socket) -> None:
    await Kubelet(config, folder, RuntimeClient(link)).run()


if __name__ == "__main__":
    sys.exit(main())
