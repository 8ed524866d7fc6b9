"""Positions that a run never consumes, as a sorted tuple of ranges [begin, end) that do not touch.

Samples are counted without the skipped positions: sample n is at the n-th position that is not skipped. The samples of
a run are therefore numbered 0, 1, 2, ... without gaps. A range that is added later does not change samples that were
consumed before it (decision "Skipped samples are ranges of positions").
"""

from __future__ import annotations

from concertina_protocol.messages.ranges import Ranges


def positions(start: int, stop: int, skipped: Ranges) -> Ranges:
    """Return the positions of the samples from `start` to `stop` - 1, as ranges in increasing order.

    The result has at least one range. If `start` equals `stop`, that range is empty.
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
