"""Which tokens of a shard stand in which sequence: planned from the documents' lengths alone, the same everywhere.

A sequence of length L has L + 1 tokens at most, in segments of one document each: the last token of a segment is only
predicted, so a segment of n tokens predicts n - 1. Longer documents are cut so that no token goes unpredicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Row r has the segments first[r] ... first[r + 1] - 1."""

    first: _Numbers
    begins: _Numbers
    """Where each segment begins in the shard, in tokens."""
    lengths: _Numbers
    """Its tokens: two at least."""

    def __len__(self) -> int:
        return len(self.first) - 1

    def predicted(self, rows: _Numbers) -> _Numbers:
        """How many tokens each of these rows predicts."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths - 1)])
        counts: _Numbers = sums[self.first[rows + 1]] - sums[self.first[rows]]
        return counts


def windows(documents: _Numbers, tokens: int, length: int) -> Rows:
    """Stretches of length + 1 tokens, one after the other, cut where documents begin. A last token that stands alone is
    left out."""
    count = max(0, (tokens - 1) // length)
    edges = np.arange(count, dtype=np.int64) * length
    inside = documents[(documents > 0) & (documents < count * length + 1)]
    begins = np.concatenate([edges, inside])
    rows = np.concatenate([np.arange(count), np.minimum((inside - 1) // length, count - 1)])
    order = np.lexsort((begins, rows))
    begins, rows = begins[order], rows[order]
    keep = np.concatenate([(begins[1:] != begins[:-1]) | (rows[1:] != rows[:-1]), [True]])[: len(begins)]
    begins, rows = begins[keep], rows[keep]
    ends = np.where(np.append(rows[1:] != rows[:-1], True), (rows + 1) * length + 1, np.append(begins[1:], 0))
    lengths = ends - begins
    whole = lengths >= 2
    return Rows(np.searchsorted(rows[whole], np.arange(count + 1)), begins[whole], lengths[whole])


def _chunks(documents: _Numbers, tokens: int, length: int) -> tuple[_Numbers, _Numbers]:
    """Begin and tokens of each piece of at most length + 1 tokens; pieces of a document share a token."""
    sizes = np.diff(np.append(documents, tokens)) - 1  # to predict
    counts = -(-sizes // length)
    owner = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = documents[owner] + nth * length
    return begins, np.minimum(sizes[owner] - nth * length, length) + 1


def singles(documents: _Numbers, tokens: int, length: int) -> Rows:
    """A document, or a piece of it, a row."""
    begins, lengths = _chunks(documents, tokens, length)
    return Rows(np.arange(len(begins) + 1), begins, lengths)


def packed(documents: _Numbers, tokens: int, length: int) -> Rows:
    """Best fit of the longest first (Johnson 1974), each piece into the fullest row that has room for it."""
    begins, lengths = _chunks(documents, tokens, length)
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)
    full = int((lengths == length + 1).sum())
    row_of[order[:full]] = np.arange(full)
    rows, spaces = full, 0  # a set bit of `spaces`: there are rows with so much room
    having: dict[int, list[int]] = {}
    for piece, size in zip(order[full:].tolist(), lengths[order[full:]].tolist(), strict=True):
        fitting = spaces >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = having[room].pop()
            if not having[room]:
                spaces ^= 1 << room
        else:
            room, row, rows = length + 1, rows, rows + 1
        row_of[piece] = row
        if room - size >= 2:
            having.setdefault(room - size, []).append(row)
            spaces |= 1 << (room - size)
    by_row = np.argsort(row_of, kind="stable")
    first = np.searchsorted(row_of[by_row], np.arange(rows + 1))
    return Rows(first, begins[by_row], lengths[by_row])


PLANS: Mapping[str, Callable[[_Numbers, int, int], Rows]] = {"masked": windows, "packed": packed, "bucketed": singles}
"""By trainer.data.documents; `joined` needs no plan."""
