"""Mutual TLS with the job's own CA. The DNS name in a certificate says who the other end is."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OPERATOR, AGENT = "operator", "agent"


def server_context(identity: Path) -> ssl.SSLContext:
    """Return the TLS context for incoming connections."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.num_tickets = 0  # sessions are never resumed; two tickets would take a third of the handshake's time
    return context


def client_context(identity: Path) -> ssl.SSLContext:
    """Return the TLS context for connections that this agent opens, with server_hostname=f"{uid}.agent".

    Certificates contain names of roles, because addresses are not known in advance.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity)


def peer_role(certificate: Mapping[str, Any], uid: str) -> str:
    """Return the role that the other end's certificate proves: OPERATOR, AGENT, or "" for any other role.

    The result is also "" for an agent of another job.
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
