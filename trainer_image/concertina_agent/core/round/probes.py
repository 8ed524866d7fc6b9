"""Whom an agent pings before a round. In pairs, a thousand agents would make a million handshakes (decision "A large
world is probed in part")."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Sequence

from concertina_protocol import Candidate

ALL_PAIRS = 32
"""Candidates up to which everybody pings everybody."""
SAMPLE = 3
"""Others that each pings in a larger world, besides its neighbours in the ring, where copies of snapshots go, and the
first of all, which may coordinate. Always the same ones, as far as they are there: connections to them are kept."""


def chosen(candidates: Sequence[Candidate], replica: str) -> tuple[Candidate, ...]:
    """In their order; itself included."""
    count = len(candidates)
    me = next((i for i, candidate in enumerate(candidates) if candidate.replica == replica), None)
    if count <= ALL_PAIRS or me is None:
        return tuple(candidates)
    beside = {0, me, (me - 1) % count, (me + 1) % count}
    seed = zlib.crc32(replica.encode())
    ranked = ((zlib.crc32(each.replica.encode(), seed), i) for i, each in enumerate(candidates) if i not in beside)
    sample = (i for _, i in heapq.nsmallest(SAMPLE, ranked))
    return tuple(candidates[i] for i in sorted({*beside, *sample}))
