"""Addresses of agents in text form: host:port, or [host]:port if the host is an IPv6 address."""

from __future__ import annotations

import socket
from typing import Tuple


def join(host: str, port: int) -> str:
    """Return the address of `host` and `port` in text form. An IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> Tuple[str, int]:
    """Return the host (without brackets) and the port of an address.

    Raises:
        ValueError: If the address has no port.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def family(host: str) -> socket.AddressFamily:
    """Return the address family (IPv4 or IPv6) of a numeric host."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
