"""Which bytes of which shards make the boxes of tensors that are wanted, planned before a byte is read. No torch.

What was saved is boxes of global tensors over the shards of one world, what is wanted are other boxes of the same
tensors. As in torch.distributed.checkpoint's planner the answer is a list of ReadItem; its own overlap arithmetic knows
no byte ranges, reads a replicated box once for each replica, and needs torch.
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
    """Elements of a tensor: `shape` from `offsets` on, in the coordinates of the global tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(chunk: Chunk) -> Box:
        return Box(chunk.offsets, chunk.shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """What both hold; None where that is nothing."""
        begins = tuple(map(max, self.offsets, other.offsets))
        shape = tuple(
            min(a + n, b + m) - begin
            for a, n, b, m, begin in zip(self.offsets, self.shape, other.offsets, other.shape, begins, strict=True)
        )
        return Box(begins, shape) if all(length > 0 for length in shape) else None

    def without(self, part: Box) -> Iterator[Box]:
        """The rest, as boxes that share nothing; `part` lies within."""
        offsets, shape = list(self.offsets), list(self.shape)
        for axis, (first, length) in enumerate(zip(part.offsets, part.shape, strict=True)):
            begin, end = offsets[axis], offsets[axis] + shape[axis]
            for low, high in ((begin, first), (first + length, end)):
                if high > low:
                    yield Box(
                        (*offsets[:axis], low, *offsets[axis + 1 :]), (*shape[:axis], high - low, *shape[axis + 1 :])
                    )
            offsets[axis], shape[axis] = first, length

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in an array that holds `outer`."""
        return tuple(slice(a - o, a - o + n) for a, n, o in zip(self.offsets, self.shape, outer.offsets, strict=True))


@dataclasses.dataclass(frozen=True)
class ReadItem:
    """A stretch of one shard's file: whole rows (of the first dimension) of a stored box, row-major. Of what they hold,
    `box` goes into the wanted `target`."""

    shard: int
    begin: int
    """Bytes [begin, begin + size) of the file."""
    dtype: str
    rows: Box
    box: Box
    target: Chunk

    @property
    def size(self) -> int:
        return self.rows.elements * ITEM_SIZES[self.dtype]

    def split(self, most: int) -> Iterator[ReadItem]:
        """At multiples of `most` in the file, as far as rows allow."""
        if not self.rows.shape or self.begin % most + self.size <= most:
            yield self
            return
        (start, *offsets), (count, *shape) = self.rows.offsets, self.rows.shape
        row, first = self.size // count, 0
        while first < count:
            begin = self.begin + first * row
            taken = min(count - first, max(1, (most - begin % most) // row))
            rows = Box((start + first, *offsets), (taken, *shape))
            box = rows.common(self.box)
            assert box is not None  # each of the rows has some of what is wanted
            yield dataclasses.replace(self, begin=begin, rows=rows, box=box)
            first += taken


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    items: tuple[ReadItem, ...]
    """Each wanted element is in one of them."""
    lacking: tuple[tuple[Chunk, Box], ...] = ()
    """Of which wanted chunk what is stored nowhere."""

    @property
    def shards(self) -> list[int]:
        return sorted({item.shard for item in self.items})

    def require(self, whence: str) -> None:
        """Raises InvalidInput where something is lacking."""
        for chunk, box in self.lacking:
            ends = [offset + length for offset, length in zip(box.offsets, box.shape, strict=True)]
            raise InvalidInput(
                f"{chunk.name} is not wholly in {whence}: its elements from {list(box.offsets)} to {ends} are in no "
                "shard. It was written by another model."
            )

    def of(self, wanted: Chunk) -> Sequence[ReadItem]:
        return self._by_target.get(wanted, ())

    @functools.cached_property
    def _by_target(self) -> Mapping[Chunk, Sequence[ReadItem]]:
        found: dict[Chunk, list[ReadItem]] = {}
        for item in self.items:
            found.setdefault(item.target, []).append(item)
        return found

    def batches(self, shard: int, most: int) -> Iterator[list[ReadItem]]:
        """Of one shard, in the file's order: what lies between two multiples of `most` bytes of the file together."""
        items = sorted((item for item in self.items if item.shard == shard), key=lambda item: item.begin)
        parts = itertools.chain.from_iterable(item.split(most) for item in items)
        for _, batch in itertools.groupby(parts, key=lambda item: item.begin // most):
            yield list(batch)


def reads(held: Mapping[int, Header], wanted: Sequence[Chunk]) -> ReadPlan:
    """`held`: what shards hold, by number; what several of them hold is read from the first. Of another dtype than what
    is wanted it may be."""
    by_name: dict[str, list[tuple[int, StoredChunk]]] = {}
    for shard, header in held.items():
        for name, stored in header.chunks.items():
            by_name.setdefault(name, []).append((shard, stored))
    items: list[ReadItem] = []
    lacking: list[tuple[Chunk, Box]] = []
    for chunk in wanted:
        left = [Box.of(chunk)] if all(chunk.shape) else []
        for shard, stored in by_name.get(chunk.name, ()):
            if not left:
                break
            box = Box.of(stored.chunk)
            found = [(part, part.common(box)) for part in left]
            items += [_item(shard, stored, common, chunk) for _, common in found if common]
            left = [rest for part, common in found for rest in (part.without(common) if common else (part,))]
        lacking += [(chunk, rest) for rest in left]
    return ReadPlan(tuple(items), tuple(lacking))


def _item(shard: int, stored: StoredChunk, box: Box, target: Chunk) -> ReadItem:
    saved = stored.chunk
    if not saved.shape:
        return ReadItem(shard, stored.begin, saved.dtype, Box.of(saved), box, target)
    rows = Box((box.offsets[0], *saved.offsets[1:]), (box.shape[0], *saved.shape[1:]))
    begin = stored.begin + (box.offsets[0] - saved.offsets[0]) * (saved.size // saved.shape[0])
    return ReadItem(shard, begin, saved.dtype, rows, box, target)
