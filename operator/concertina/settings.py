"""The operator's settings, from the environment that the chart gives it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from concertina.cluster import notice_taints
from concertina.cluster.notice_taints import NOTICE_TAINTS
from concertina.cluster.pod import Images
from concertina.control.authority import MASTER_KEY_BYTES

TAINTS = "CONCERTINA_NOTICE_TAINTS"
"""A list with commas; absent: the well-known ones; empty: none."""


class SettingsError(Exception):
    """A setting is missing or wrong; the sentence says which."""


@dataclass(frozen=True)
class Settings:
    namespace: str
    """Of the operator itself: its Lease is there."""
    identity: str
    """Of this process, in the Lease."""
    master_key: bytes
    images: Images
    watch_namespaces: tuple[str, ...]
    """Empty: all."""
    health: tuple[str, int] | None
    """Host and port of the probes; None: no probes."""
    notice_taints: tuple[str, ...] = NOTICE_TAINTS
    """Taints, as key or key=value, that announce the end of a node."""


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    names = environment.get("CONCERTINA_WATCH_NAMESPACES", "").replace(",", " ").split()
    return Settings(
        namespace=_required(environment, "CONCERTINA_NAMESPACE", "the namespace that the operator runs in"),
        identity=environment.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        master_key=_master_key(_required(environment, "CONCERTINA_MASTER_KEY_FILE", "the file with the master key")),
        images=Images(_required(environment, "CONCERTINA_IMAGE_AGENT", "the image that holds the agent")),
        watch_namespaces=tuple(names),
        health=_address(environment.get("CONCERTINA_HEALTH", "")),
        notice_taints=notice_taints.parse(taints) if (taints := environment.get(TAINTS)) is not None else NOTICE_TAINTS,
    )


def _required(environment: Mapping[str, str], name: str, meaning: str) -> str:
    if not environment.get(name):
        raise SettingsError(f"{name} is not set; it is {meaning}")
    return environment[name]


def _master_key(path: str) -> bytes:
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"the master key can't be read: {error}") from error
    if len(key) < MASTER_KEY_BYTES:
        raise SettingsError(f"the master key in {path} has {len(key)} bytes; it needs {MASTER_KEY_BYTES} or more")
    return key


def _address(text: str) -> tuple[str, int] | None:
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdigit():
        raise SettingsError(f"CONCERTINA_HEALTH is {text!r}; it must be HOST:PORT")
    return host.strip("[]"), int(port)
