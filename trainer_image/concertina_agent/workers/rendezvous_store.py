"""The address at which the workers of a round meet: a bound socket, or a free port for a command that serves it."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from concertina_protocol.addresses import family

PORTS = range(20000, 32000)
"""Below the ports that Linux gives to outgoing connections, so that a free one stays free until a worker binds it."""


def bind(host: str) -> socket.socket:
    """A listening socket at `host` and a port of the kernel's choice."""
    listening = socket.socket(family(host), socket.SOCK_STREAM)
    listening.bind((host, 0))
    listening.listen(2048)
    return listening


def reserve(host: str) -> int:
    """A port that is free at this moment on every address (torch's store binds them all) and on `host`. Raises OSError
    where there is none."""
    kind = family(host)
    for port in random.sample(PORTS, 200):
        with contextlib.suppress(OSError), socket.socket(kind) as one, socket.socket(kind) as every:
            one.bind((host, port))
            one.close()
            every.bind(("", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port on {host}")
