"""Candidates that an agent pings before a round.

If each of a thousand agents pinged all others, there would be a million handshakes (decision "A large world is probed
in part").
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Sequence

from concertina_protocol import Candidate

ALL_PAIRS = 32
"""Number of candidates up to which every agent pings all others."""
SAMPLE = 3
"""Number of further candidates that an agent pings in a larger world.

An agent also pings its neighbours in the ring, which exchange copies of snapshots, and the first candidate, which may
be the coordinator. It selects the same candidates each time, as far as they exist, so that connections to them can be
kept.
"""


def chosen(candidates: Sequence[Candidate], replica: str) -> tuple[Candidate, ...]:
    """Return the candidates to ping, in their order, including this agent."""
    count = len(candidates)
    own_index = next((i for i, candidate in enumerate(candidates) if candidate.replica == replica), None)
    if count <= ALL_PAIRS or own_index is None:
        return tuple(candidates)
    beside = {0, own_index, (own_index - 1) % count, (own_index + 1) % count}
    seed = zlib.crc32(replica.encode())
    ranked = (
        (zlib.crc32(candidate.replica.encode(), seed), i) for i, candidate in enumerate(candidates) if i not in beside
    )
    sample = (i for _, i in heapq.nsmallest(SAMPLE, ranked))
    return tuple(candidates[i] for i in sorted({*beside, *sample}))
