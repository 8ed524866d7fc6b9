"""Plan of which tokens of a shard make which sequence, from the documents' lengths alone, the same everywhere.

A sequence of length L has at most L + 1 tokens, in segments of one document each. The last token of a segment is only
predicted, so a segment of n tokens predicts n - 1. Longer documents are cut so that every token but the first is
predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class SequencePlan:
    """Plan of one shard: sequence i has the segments first[i] ... first[i + 1] - 1."""

    first: _Numbers
    begins: _Numbers
    """Offset of each segment in the shard, in tokens."""
    lengths: _Numbers
    """Tokens of each segment, at least two."""

    def __len__(self) -> int:
        return len(self.first) - 1

    def predicted(self, indexes: _Numbers) -> _Numbers:
        """Return how many tokens each of these sequences predicts."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths - 1)])
        counts: _Numbers = sums[self.first[indexes + 1]] - sums[self.first[indexes]]
        return counts


def masked(begins: _Numbers, tokens: int, length: int) -> SequencePlan:
    """Plan ranges of length + 1 tokens, one after the other, cut where documents begin.

    A last token that is alone is left out.
    """
    count = max(0, (tokens - 1) // length)
    edges = np.arange(count, dtype=np.int64) * length
    inside = begins[(begins > 0) & (begins < count * length + 1)]
    cuts = np.concatenate([edges, inside])
    owners = np.concatenate([np.arange(count), np.minimum((inside - 1) // length, count - 1)])
    order = np.lexsort((cuts, owners))
    cuts, owners = cuts[order], owners[order]
    keep = np.concatenate([(cuts[1:] != cuts[:-1]) | (owners[1:] != owners[:-1]), [True]])[: len(cuts)]
    cuts, owners = cuts[keep], owners[keep]
    ends = np.where(np.append(owners[1:] != owners[:-1], True), (owners + 1) * length + 1, np.append(cuts[1:], 0))
    lengths = ends - cuts
    whole = lengths >= 2
    return SequencePlan(np.searchsorted(owners[whole], np.arange(count + 1)), cuts[whole], lengths[whole])


def _segments(begins: _Numbers, tokens: int, length: int) -> tuple[_Numbers, _Numbers]:
    """Return the offset and length of each segment of at most length + 1 tokens.

    Segments of a document share a token.
    """
    sizes = np.diff(np.append(begins, tokens)) - 1  # to predict
    counts = -(-sizes // length)
    owner = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return begins[owner] + nth * length, np.minimum(sizes[owner] - nth * length, length) + 1


def bucketed(begins: _Numbers, tokens: int, length: int) -> SequencePlan:
    """Plan a sequence for each segment."""
    segments, lengths = _segments(begins, tokens, length)
    return SequencePlan(np.arange(len(segments) + 1), segments, lengths)


def packed(begins: _Numbers, tokens: int, length: int) -> SequencePlan:
    """Plan by best fit, longest first (Johnson 1974).

    Each segment goes into the fullest sequence that has room for it.
    """
    segments, lengths = _segments(begins, tokens, length)
    order = np.argsort(-lengths, kind="stable")
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    full = int((lengths == length + 1).sum())
    sequence_of[order[:full]] = np.arange(full)
    count, spaces = full, 0  # bit n of `spaces` is set if there are sequences with room for n tokens
    having: dict[int, list[int]] = {}
    for segment, size in zip(order[full:].tolist(), lengths[order[full:]].tolist(), strict=True):
        fitting = spaces >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            sequence = having[room].pop()
            if not having[room]:
                spaces ^= 1 << room
        else:
            room, sequence, count = length + 1, count, count + 1
        sequence_of[segment] = sequence
        if room - size >= 2:
            having.setdefault(room - size, []).append(sequence)
            spaces |= 1 << (room - size)
    in_order = np.argsort(sequence_of, kind="stable")
    first = np.searchsorted(sequence_of[in_order], np.arange(count + 1))
    return SequencePlan(first, segments[in_order], lengths[in_order])


PLANNERS: Mapping[str, Callable[[_Numbers, int, int], SequencePlan]] = {
    "Masked": masked, "Packed": packed, "Bucketed": bucketed,
}  # fmt: skip
"""Planner by trainer.data.documents.

Its arguments are where each document begins, how many tokens the shard has, and a sequence's length. `joined` needs no
plan.
"""
