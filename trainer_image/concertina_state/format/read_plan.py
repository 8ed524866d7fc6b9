"""Planning of a restore: which bytes of which shards contain the requested boxes of tensors.

A box is a rectangular part of a global tensor. A saved state consists of boxes, each of which is in the shard of the
rank that saved it. A restore with a different number of ranks requests different boxes of the same tensors. The whole
plan is made before any byte is read.

A plan is a list of ReadItem, as in the planner of torch.distributed.checkpoint. That planner is not used here, because
it requires torch, does not compute byte ranges, and reads a replicated box once for each replica.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import ITEM_SIZES, Chunk, Header, StoredChunk


@dataclasses.dataclass(frozen=True)
class Box:
    """Rectangular part of a global tensor: the elements with coordinates from `offsets` to `offsets` + `shape`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(chunk: Chunk) -> Box:
        return Box(chunk.offsets, chunk.shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def common(self, second: Box) -> Box | None:
        """Return the box of the elements that this box and `second` share, or None if they share none."""
        begins = tuple(map(max, self.offsets, second.offsets))
        shape = tuple(
            min(a + n, b + m) - begin
            for a, n, b, m, begin in zip(self.offsets, self.shape, second.offsets, second.shape, begins)
        )
        return Box(begins, shape) if all(length > 0 for length in shape) else None

    def without(self, part: Box) -> Iterator[Box]:
        """Yield the elements of this box that are not in `part`, as boxes that do not overlap.

        `part` is within this box.
        """
        offsets, shape = list(self.offsets), list(self.shape)
        for axis, (first, length) in enumerate(zip(part.offsets, part.shape)):
            begin, end = offsets[axis], offsets[axis] + shape[axis]
            for low, high in ((begin, first), (first + length, end)):
                if high > low:
                    yield Box(
                        (*offsets[:axis], low, *offsets[axis + 1 :]), (*shape[:axis], high - low, *shape[axis + 1 :])
                    )
            offsets[axis], shape[axis] = first, length

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box in an array that contains the box `outer`."""
        return tuple(slice(a - o, a - o + n) for a, n, o in zip(self.offsets, self.shape, outer.offsets))


@dataclasses.dataclass(frozen=True)
class ReadItem:
    """Contiguous bytes of a shard's file to read: whole rows of a stored box (rectangular part of a tensor).

    A row is the part of the stored box at one index of the first dimension. `target` is a requested chunk. `box` is the
    box of those elements of the rows that belong to `target`.
    """

    shard: int
    begin: int
    """Offset in the file of the first byte to read."""
    dtype: str
    rows: Box
    box: Box
    target: Chunk

    @property
    def size(self) -> int:
        return self.rows.elements * ITEM_SIZES[self.dtype]

    def split(self, most: int) -> Iterator[ReadItem]:
        """Divide the item into items whose bytes do not cross a multiple of `most` in the file, and yield them.

        An item always has whole rows. If a row is longer than `most` bytes, its item is therefore longer too.
        """
        if not self.rows.shape or self.begin % most + self.size <= most:
            yield self
            return
        (start, *offsets), (count, *shape) = self.rows.offsets, self.rows.shape
        row, first = self.size // count, 0
        while first < count:
            begin = self.begin + first * row
            row_count = min(count - first, max(1, (most - begin % most) // row))
            rows = Box((start + first, *offsets), (row_count, *shape))
            box = rows.common(self.box)
            assert box is not None  # each row has elements that the target needs
            yield dataclasses.replace(self, begin=begin, rows=rows, box=box)
            first += row_count


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    items: tuple[ReadItem, ...]
    """Items to read. Together, the items contain all requested elements that are stored in any shard."""
    lacking: tuple[tuple[Chunk, Box], ...] = ()
    """Requested elements that no shard stores, as pairs of the requested chunk and the box of the elements."""

    @property
    def shards(self) -> list[int]:
        return sorted(self._by_shard)

    def require(self, whence: str) -> None:
        """Check that the shards store all requested elements. `whence` names the saved state in the error message.

        Raises:
            InvalidInput: When there are requested elements that no shard stores.
        """
        for chunk, box in self.lacking:
            ends = [offset + length for offset, length in zip(box.offsets, box.shape)]
            raise InvalidInput(
                f"{chunk.name} is incomplete in {whence}: no shard contains its elements from "
                f"{list(box.offsets)} to {ends}. Another model wrote it."
            )

    def of(self, target: Chunk) -> Sequence[ReadItem]:
        return self._by_target.get(target, ())

    @functools.cached_property
    def _by_target(self) -> Mapping[Chunk, Sequence[ReadItem]]:
        items_by_target: dict[Chunk, list[ReadItem]] = {}
        for item in self.items:
            items_by_target.setdefault(item.target, []).append(item)
        return items_by_target

    @functools.cached_property
    def _by_shard(self) -> Mapping[int, Sequence[ReadItem]]:
        items_by_shard: dict[int, list[ReadItem]] = {}
        for item in self.items:
            items_by_shard.setdefault(item.shard, []).append(item)
        return items_by_shard

    def batches(self, shard: int, most: int) -> Iterator[list[ReadItem]]:
        """Yield batches of the items of one shard, in the order of the file.

        A batch consists of the items that begin between two consecutive multiples of `most` bytes in the file.
        """
        items = sorted(self._by_shard.get(shard, ()), key=lambda item: item.begin)
        parts = itertools.chain.from_iterable(item.split(most) for item in items)
        for _, batch in itertools.groupby(parts, key=lambda item: item.begin // most):
            yield list(batch)


def reads(headers: Mapping[int, Header], chunks: Sequence[Chunk]) -> ReadPlan:
    """Plan which bytes of which shards to read for the requested chunks.

    `headers` contains the header of each shard, keyed by the shard's number. Elements that several shards contain are
    read from the first of these shards. The stored dtype may differ from the requested dtype.
    """
    by_name: dict[str, list[tuple[int, StoredChunk]]] = {}
    for shard, header in headers.items():
        for name, stored in header.chunks.items():
            by_name.setdefault(name, []).append((shard, stored))
    items: list[ReadItem] = []
    lacking: list[tuple[Chunk, Box]] = []
    for chunk in chunks:
        remaining = [Box.of(chunk)] if all(chunk.shape) else []
        for shard, stored in by_name.get(chunk.name, ()):
            if not remaining:
                break
            box = Box.of(stored.chunk)
            overlaps = [(part, part.common(box)) for part in remaining]
            items += [_item(shard, stored, common, chunk) for _, common in overlaps if common]
            remaining = [rest for part, common in overlaps for rest in (part.without(common) if common else (part,))]
        lacking += [(chunk, rest) for rest in remaining]
    return ReadPlan(tuple(items), tuple(lacking))


def _item(shard: int, stored: StoredChunk, box: Box, target: Chunk) -> ReadItem:
    saved = stored.chunk
    if not saved.shape:
        return ReadItem(shard, stored.begin, saved.dtype, Box.of(saved), box, target)
    rows = Box((box.offsets[0], *saved.offsets[1:]), (box.shape[0], *saved.shape[1:]))
    begin = stored.begin + (box.offsets[0] - saved.offsets[0]) * (saved.size // saved.shape[0])
    return ReadItem(shard, begin, saved.dtype, rows, box, target)
