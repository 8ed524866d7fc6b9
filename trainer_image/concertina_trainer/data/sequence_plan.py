"""Plan of the sequences of a shard: which of the shard's tokens form each sequence.

The plan depends only on the lengths of the documents, so it is the same on every machine.

A sequence of length L has at most L + 1 tokens. It consists of segments, each of which belongs to one document. Within
a segment, each token but the first is predicted, so a segment of n tokens has n - 1 predictions. A document of more
than L + 1 tokens becomes several segments. Each token of the document except the first is predicted in one of these
segments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class SequencePlan:
    """Plan of the sequences of one shard. Sequence i consists of the segments from first[i] to first[i + 1] - 1."""

    first: _Numbers
    begins: _Numbers
    """Offset of each segment in the shard, in tokens."""
    lengths: _Numbers
    """Number of tokens of each segment, which is at least two."""

    def __len__(self) -> int:
        return len(self.first) - 1

    def segments(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield the offset in the sequence, the offset in the shard, and the length of each segment of a sequence.

        All three are numbers of tokens, or of feature vectors (frames) if the documents are not text.
        """
        offset = 0
        for segment in range(int(self.first[index]), int(self.first[index + 1])):
            size = int(self.lengths[segment])
            yield offset, int(self.begins[segment]), size
            offset += size

    def sums(self, weights: NDArray[np.uint8]) -> _Numbers:
        """Return, for each sequence, the sum of the weights of its predicted tokens.

        `weights` contains the weight of each token of the shard.
        """
        before = np.zeros(len(weights) + 1, dtype=np.uint32)
        np.cumsum(weights, dtype=np.uint32, out=before[1:])
        of_segments = before[self.begins + self.lengths] - before[self.begins + 1]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_segments, dtype=np.int64)])
        sums: _Numbers = ends[self.first[1:]] - ends[self.first[:-1]]
        return sums

    @functools.cached_property
    def predicted(self) -> _Numbers:
        """Number of predicted tokens of each sequence."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths - 1)])
        counts: _Numbers = sums[self.first[1:]] - sums[self.first[:-1]]
        return counts


def masked(begins: _Numbers, tokens: int, length: int) -> SequencePlan:
    """Plan sequences of length + 1 consecutive tokens, divided into segments at the beginnings of documents.

    A segment of a single token is left out, because it contains no token to predict.
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
    """Divide each document into segments of at most `length` + 1 tokens, and return their offsets and lengths.

    The last token of a segment is also the first token of the document's next segment.
    """
    sizes = np.diff(np.append(begins, tokens)) - 1  # number of tokens to predict
    counts = -(-sizes // length)
    owner = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return begins[owner] + nth * length, np.minimum(sizes[owner] - nth * length, length) + 1


def bucketed(begins: _Numbers, tokens: int, length: int) -> SequencePlan:
    """Plan one sequence for each segment of a document, for the mode `bucketed`."""
    segments, lengths = _segments(begins, tokens, length)
    return SequencePlan(np.arange(len(segments) + 1), segments, lengths)


def packed(begins: _Numbers, tokens: int, length: int) -> SequencePlan:
    """Plan sequences of several segments by the algorithm best fit decreasing (Johnson 1974).

    The segments are added in order of length, the longest first. Each segment is added to the fullest sequence with
    space for it.
    """
    segments, lengths = _segments(begins, tokens, length)
    order = np.argsort(-lengths, kind="stable")
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    full = int((lengths == length + 1).sum())
    sequence_of[order[:full]] = np.arange(full)
    count, spaces = full, 0  # bit n of `spaces` is set if some sequence has space for exactly n tokens
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
"""Function that plans the sequences of a shard, keyed by the value of trainer.data.documents.

The function receives the offset of each document, the number of tokens of the shard, and the length of a sequence. The
value `Joined` needs no plan.
"""
