"""Id of the OpenTelemetry trace of a round.

A round is a period in which a fixed set of replicas trains. The id is computed from the job's uid and the round's
number, so no message has to contain it (decision "A round's trace id is made of uid and number"). The module uses the
standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import hashlib


def trace_id(uid: str, round: int) -> str:
    """Return the 128-bit id of a round's trace as 32 hexadecimal digits, which is the form that OpenTelemetry uses."""
    return hashlib.sha256(f"{uid}/{round}".encode()).hexdigest()[:32]
