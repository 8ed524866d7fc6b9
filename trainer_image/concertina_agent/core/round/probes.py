"""Selection of the replicas to which an agent sends a Ping before a round, among all candidates for that round.

If each of a thousand agents sent a Ping to all others, there would be a million TLS handshakes (decision "Large jobs
test only some connections").

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Sequence

from concertina_protocol import Candidate

ALL_PAIRS = 32
"""Maximum number of candidates for which every agent sends a Ping to all others."""
SAMPLE = 3
"""Number of candidates, chosen by a hash, to which an agent sends a Ping if there are more than ALL_PAIRS.

The agent also sends a Ping to its neighbours in the ring of copies, and to the first candidate, which may become the
coordinator. An agent chooses the same candidates before each round, if they still exist, so that it can reuse
connections.
"""


def chosen(candidates: Sequence[Candidate], replica: str) -> tuple[Candidate, ...]:
    """Return the candidates for a round to which this agent sends a Ping, in the order of `candidates`.

    The result includes the agent's own replica.
    """
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
