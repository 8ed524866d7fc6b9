"""Whom an agent pings before a round. In pairs, a thousand agents would make a million handshakes (decision "A large
world is probed in part")."""

from __future__ import annotations

import random
from collections.abc import Sequence

from concertina_protocol import Candidate

ALL_PAIRS = 32
"""Candidates up to which everybody pings everybody."""
NEIGHBOURS = 4
"""On each side in the ring: copies of snapshots and most of a collective's traffic go there."""
SAMPLE = 8
"""Others, drawn anew by each agent for each round: who is cut off from many is found by some."""


def chosen(candidates: Sequence[Candidate], replica: str, claim: str) -> tuple[Candidate, ...]:
    """In their order; itself included. The first of all is always among them, since it may lead."""
    count = len(candidates)
    me = next((i for i, candidate in enumerate(candidates) if candidate.replica == replica), None)
    if count <= ALL_PAIRS or me is None:
        return tuple(candidates)
    ring = {(me + step) % count for step in range(-NEIGHBOURS, NEIGHBOURS + 1)}
    drawn = random.Random(f"{claim} {replica}").sample(range(count), SAMPLE)
    return tuple(candidates[i] for i in sorted({0, *ring, *drawn}))
