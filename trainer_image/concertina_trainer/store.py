"""TCPStore of a round, in a child process of the coordinator's agent.

A round is a period in which a fixed set of replicas trains. The store must be in a process of its own, so that it
outlives the round's workers.
"""

from __future__ import annotations

import datetime
import signal
import socket
from typing import NoReturn

from torch.distributed import TCPStore


def serve(fd: str) -> NoReturn:
    """Serve a TCPStore on the bound and listening socket with the file descriptor `fd`, until killed."""
    listener = socket.socket(fileno=int(fd))
    host, port = listener.getsockname()[:2]
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=datetime.timedelta(minutes=10),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    while True:
        signal.pause()
    del store
