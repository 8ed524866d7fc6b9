"""Id of a round's trace.

The id follows from the job's uid and the round's number, so it does not have to be communicated (decision "A round's
trace id is made of uid and number"). The module uses the standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import hashlib


def trace_id(uid: str, round: int) -> str:
    """Return the 128-bit trace id as OpenTelemetry writes it, in 32 hexadecimal digits."""
    return hashlib.sha256(f"{uid}/{round}".encode()).hexdigest()[:32]
