"""Sequences of each data set from which a range of samples was taken.

The sequences are computed from the configuration, without reading the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from concertina_protocol.messages.ranges import Ranges
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.read.interleave import before


@dataclasses.dataclass(frozen=True)
class Consumed:
    """Sequences from `begin` to `end` - 1 in one data set's own order.

    The numbers continue from epoch to epoch. The range includes sequences that were skipped.
    """

    uri: str
    begin: int
    end: int


def positions(begin: int, end: int, skipped: Ranges) -> tuple[int, int]:
    """Return the range of positions in the data that contains the samples from `begin` to `end` - 1."""
    first, last = (_position(sample, skipped) for sample in (begin, max(begin, end - 1)))
    return first, last + 1 if end > begin else first


def consumed(data: DataConfig, begin: int, end: int, skipped: Ranges) -> Sequence[Consumed]:
    """Return the sequences of each data set that belong to the samples from `begin` to `end` - 1."""
    first, last = positions(begin, end, skipped)
    weights = [source.weight for source in data.sources]
    edges = zip(data.sources, before(weights, first), before(weights, last), strict=True)
    return [Consumed(source.uri, *edge) for source, *edge in edges]


def _position(sample: int, skipped: Ranges) -> int:
    """Return the position of sample number `sample`.

    `batch_order.Skipped` computes the same for many samples at once.
    """
    for begin, end in skipped:
        if sample < begin:
            break
        sample += end - begin
    return sample
