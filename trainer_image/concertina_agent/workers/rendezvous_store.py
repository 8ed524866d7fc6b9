"""Address of a round's c10d store: a socket that the agent has bound, or a free port for the command's own store.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from concertina_protocol.addresses import family

PORTS = range(20000, 32000)
"""Ports to choose from. They are below Linux's ports for outgoing connections, so a free one stays free for a while."""


def bind(host: str) -> socket.socket:
    """Return a listening socket at `host`, at a port that the kernel chooses."""
    listening = socket.socket(family(host), socket.SOCK_STREAM)
    listening.bind((host, 0))
    listening.listen(2048)
    return listening


def reserve(host: str) -> int:
    """Return a port that is free at this moment on `host` and on all other addresses, which torch's store binds too.

    Raises:
        OSError: If no port is free.
    """
    kind = family(host)
    for port in random.sample(PORTS, 200):
        with contextlib.suppress(OSError), socket.socket(kind) as host_socket, socket.socket(kind) as any_socket:
            host_socket.bind((host, port))
            host_socket.close()
            any_socket.bind(("", port))
            return port
    raise OSError(errno.EADDRINUSE, f"there is no free port on {host}")
