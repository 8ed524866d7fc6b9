"""Addresses as agents write them: host:port, and [host]:port for IPv6."""

from __future__ import annotations

import socket
from typing import Tuple


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> Tuple[str, int]:
    """Host, without brackets, and port. Raises ValueError where there is none."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
