"""Positions that are never consumed: a sorted tuple of ranges [begin, end) that don't touch.

Consumed samples are counted without them: sample n of a run is at the n-th position that is not skipped. So a run
consumes 0, 1, 2, ... in this count whatever was skipped, and a range that is added ahead of what was consumed changes
nothing in the past (decision "Samples that are left out are counted out").
"""

from __future__ import annotations

from concertina_protocol.messages.ranges import Ranges


def positions(start: int, stop: int, skipped: Ranges) -> Ranges:
    """Return the positions of the samples start ... stop-1, as ranges in order.

    There is at least one range, which may be empty.
    """
    ranges, shift = [], 0
    for begin, end in skipped:
        reached = begin - shift
        if reached >= stop:
            break
        if reached > start:
            ranges.append((start + shift, begin))
            start = reached
        shift += end - begin
    return (*ranges, (start + shift, stop + shift))
