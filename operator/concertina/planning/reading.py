"""Data that each replica of the bundled trainer reads from the store.

A replica reads all shards of the groups that its workers train on (`trainer.data.groups`).
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from concertina.planning.layout import ParallelLayout
from concertina.planning.traffic import batch
from concertina_data.data_manifest import Field, token_field
from concertina_data.order import classes


@dataclasses.dataclass(frozen=True)
class Reading:
    """Groups of shards that replicas read."""

    total: int
    """Number of groups of the data."""
    groups: tuple[int, ...]
    """Number of groups that each replica reads."""
    element_bytes: int
    """Bytes of an element on disk: a token, if the data use the whole vocabulary of the model, and other fields."""

    @property
    def times(self) -> float:
        """Number of times that all replicas together read the data in an epoch."""
        return sum(self.groups) / self.total

    def rate(self, tokens: float) -> float:
        """Return the bytes per second that the replica with the most groups reads, at `tokens` tokens per second."""
        return tokens * self.element_bytes * max(self.groups) / self.total


def reading(layout: ParallelLayout) -> Reading:
    """Return what each replica reads. The replica's workers share one cache.

    With `documents: Bucketed` or `balance: Speed`, the parts of the ranks vary, and replicas can read more groups.
    """
    groups: list[set[int]] = [set() for _ in range(layout.size // layout.per_node)]
    width, cuts = layout.degrees.group, batch(layout)
    for order, ends in _batches(cuts.global_size, layout.trainer.data.groups):
        for rank in range(layout.degrees.data):
            first, last = rank * width // layout.per_node, ((rank + 1) * width - 1) // layout.per_node
            own = {
                group
                for cut in cuts.slices(rank)
                for group in order[bisect_right(ends, cut.start) : bisect_left(ends, cut.stop) + 1]
                if cut
            }
            for replica in range(first, last + 1):
                groups[replica] |= own
    return Reading(layout.trainer.data.groups, tuple(map(len, groups)), _element_bytes(layout))


def _element_bytes(layout: ParallelLayout) -> int:
    vocabulary = layout.own.data["vocab_size"] if layout.own else layout.trainer.model.vocab_size
    fields = [Field(**field) for field in layout.own.data["fields"]] if layout.own else []
    token = [token_field(vocabulary)] if vocabulary else []
    return sum(field.bytes for field in (*token, *fields))


def _batches(size: int, groups: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield batches until they repeat: the groups in the order in which ranks share a batch, and where each ends.

    A group without sequences in a batch is left out.
    """
    modulus = classes(size, groups)
    in_order = sorted(range(groups), key=lambda group: (group % modulus, group))
    for start in range(0, groups, modulus):
        counts = [size // groups + ((group - start) % groups < size % groups) for group in in_order]
        some = [(group, count) for group, count in zip(in_order, counts, strict=True) if count]
        yield [group for group, _ in some], list(itertools.accumulate(count for _, count in some))
