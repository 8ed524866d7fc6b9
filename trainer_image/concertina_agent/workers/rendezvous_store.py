"""Address at which the workers of a round meet: a bound socket, or a free port for a command that serves it."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from concertina_protocol.addresses import family

PORTS = range(20000, 32000)
"""Ports below those of outgoing connections on Linux, so that a free one stays free until a worker binds it."""


def bind(host: str) -> socket.socket:
    """Return a listening socket at `host` and a port that the kernel chooses."""
    listening = socket.socket(family(host), socket.SOCK_STREAM)
    listening.bind((host, 0))
    listening.listen(2048)
    return listening


def reserve(host: str) -> int:
    """Return a port that is free at this moment on every address (torch's store binds them all) and on `host`.

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
    raise OSError(errno.EADDRINUSE, f"no free port on {host}")
