"""The c10d store of a round, served by a child of the coordinator's agent that outlives the round's workers."""

from __future__ import annotations

import datetime
import signal
import socket
from typing import NoReturn

from torch.distributed import TCPStore


def serve(fd: str | int) -> NoReturn:
    """Serve a TCPStore on an already bound, listening socket (its file descriptor) until killed."""
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
