"""The id of a round's trace: whoever knows the job's uid and the round's number knows it, and nobody has to be told
(decision "A round's trace id is made of uid and number"). Standard library only, Python 3.9+."""

from __future__ import annotations

import hashlib


def trace_id(uid: str, round: int) -> str:
    """128 bits as OpenTelemetry writes them, 32 hexadecimal digits."""
    return hashlib.sha256(f"{uid}/{round}".encode()).hexdigest()[:32]
