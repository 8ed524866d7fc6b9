"""Which sequences of which data sets a stretch of samples is: from the configuration alone, without the data."""

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
    """Of one data set: the sequences [begin, end) of its own order, which goes on from epoch to epoch; those that were
    left out in between are among them."""

    uri: str
    begin: int
    end: int


def positions(begin: int, end: int, skipped: Ranges) -> tuple[int, int]:
    """The stretch of positions [begin, end) in which the samples [begin, end) stand."""
    first, last = Skipped(skipped).position_of(np.array([begin, max(begin, end - 1)], dtype=np.int64)).tolist()
    return first, last + 1 if end > begin else first


def consumed(data: DataConfig, begin: int, end: int, skipped: Ranges) -> Sequence[Consumed]:
    """Of each data set, for the samples [begin, end)."""
    first, last = positions(begin, end, skipped)
    interleave = Interleave([source.weight for source in data.sources])
    edges = zip(data.sources, interleave.before(first), interleave.before(last), strict=True)
    return [Consumed(source.uri, before, after) for source, before, after in edges]
