"""Estimate of the data that each replica of the bundled trainer reads from the data's store.

A dataset is divided into groups of shards (`trainer.data.groups`). A replica reads all shards of the groups that its
workers train on.
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
    """Numbers of shard groups that the replicas read."""

    total: int
    """Number of shard groups of the dataset."""
    groups: tuple[int, ...]
    """Number of shard groups that each replica reads, by index of the replica."""
    element_bytes: int
    """Size of one element of a sequence on disk in bytes: its token, if there is one, and its other fields."""

    @property
    def times(self) -> float:
        """Average number of replicas that read each part of the dataset."""
        return sum(self.groups) / self.total

    def rate(self, tokens: float) -> float:
        """Return the bytes per second that the replica with the most groups reads.

        `tokens` is the number of tokens per second that the job trains.
        """
        return tokens * self.element_bytes * max(self.groups) / self.total


def reading(layout: ParallelLayout) -> Reading:
    """Return the numbers of shard groups that the replicas read. The workers of a replica share one cache.

    With `documents: Bucketed` or `balance: Speed`, the ranks' parts of a batch vary, and a replica can read more groups
    than estimated.
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
    """Yield the composition of each batch, up to the batch after which the compositions repeat.

    Each batch is a list of groups in the order of their sequences in the batch, and a list with the end of each group's
    sequences. A group without sequences in a batch is left out.
    """
    modulus = classes(size, groups)
    in_order = sorted(range(groups), key=lambda group: (group % modulus, group))
    for start in range(0, groups, modulus):
        counts = [size // groups + ((group - start) % groups < size % groups) for group in in_order]
        some = [(group, count) for group, count in zip(in_order, counts, strict=True) if count]
        yield [group for group, _ in some], list(itertools.accumulate(count for _, count in some))
