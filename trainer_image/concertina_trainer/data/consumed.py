"""Sequences of each data set that a range of samples consists of, from the configuration alone, without the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from concertina_protocol.messages.ranges import Ranges
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.batch_order import Skipped
from concertina_trainer.data.read.mixture import Interleave


@dataclasses.dataclass(frozen=True)
class Consumed:
    """Sequences [begin, end) of one data set's own order.

    The order continues from epoch to epoch. Sequences that were skipped in between are included.
    """

    uri: str
    begin: int
    end: int


def positions(begin: int, end: int, skipped: Ranges) -> tuple[int, int]:
    """Return the range of positions that the samples [begin, end) are in."""
    first, last = Skipped(skipped).position_of(np.array([begin, max(begin, end - 1)], dtype=np.int64)).tolist()
    return first, last + 1 if end > begin else first


def consumed(data: DataConfig, begin: int, end: int, skipped: Ranges) -> Sequence[Consumed]:
    """Return the sequences of each data set for the samples [begin, end)."""
    first, last = positions(begin, end, skipped)
    interleave = Interleave([source.weight for source in data.sources])
    edges = zip(data.sources, interleave.before(first), interleave.before(last), strict=True)
    return [Consumed(source.uri, before, after) for source, before, after in edges]
