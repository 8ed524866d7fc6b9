"""Mutual TLS under the job's own CA, which identifies the other end by the DNS name in its certificate."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OPERATOR, AGENT = "operator", "agent"


def server_context(identity: Path) -> ssl.SSLContext:
    """Return the TLS context for incoming connections."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.num_tickets = 0  # sessions are not resumed, and two tickets are a third of a server's handshake
    return context


def client_context(identity: Path) -> ssl.SSLContext:
    """Return the TLS context for connections with server_hostname=f"{uid}.agent".

    Addresses are not known in advance, so names stand for roles.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity)


def peer_role(certificate: Mapping[str, Any], uid: str) -> str:
    """Return the role that the other end's certificate proves: OPERATOR, AGENT, or empty for any other.

    An agent of another job has an empty role, too.
    """
    names = {name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"}
    return next((role for role in (OPERATOR, AGENT) if f"{uid}.{role}" in names), "")


def _context(protocol: int, identity: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(identity / "ca.crt")
    context.load_cert_chain(identity / "tls.crt", identity / "tls.key")
    return context
