"""Arrays that are plain memory (numpy's, the standard library's, what JAX was asked for): how they are saved and filled
where there is no torch."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from mmap import mmap

from concertina_state import filling
from concertina_state.filling import Place, ShardReader
from concertina_state.format.read_plan import Box, ReadItem, ReadPlan
from concertina_state.format.shardfile import ITEM_SIZES, Chunk, Layout
from concertina_state.holdings import ArrayShard, Copies, LocalArray, LocalState, held_part, own_chunk
from concertina_state.live import Arrival

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""As numpy names them (ml_dtypes those that numpy has not), and safetensors."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Elements of one dtype, row-major and without a gap."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    memory: memoryview
    """Live, as bytes. It can be written to."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Buffer:
        begin, end, _ = rows.indices(len(self))
        row = len(self.memory) // len(self) if len(self) else 0
        return Buffer(self.dtype, (end - begin, *self.shape[1:]), self.memory[begin * row : end * row])

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) if len(self.memory) else 0


class Buffers:
    """What a shard holds: places in a file, and the memory that belongs into each."""

    def __init__(self, layout: Layout, buffers: Sequence[Buffer]) -> None:
        """`buffers`: live, in the layout's order."""
        self.layout, self._buffers = layout, buffers

    def views(self, file: mmap) -> list[memoryview]:
        """Of the places."""
        whole = memoryview(file)
        begins = zip(self.layout.chunks, self.layout.begins, strict=True)
        return [whole[begin : begin + chunk.size] for chunk, begin in begins]

    def copy_to(self, views: Sequence[memoryview]) -> Arrival:
        """What the arrays hold now."""
        for view, buffer in zip(views, self._buffers, strict=True):
            view[:] = buffer.memory
        return lambda: 0.0

    def before_change(self) -> None:
        """Nothing is being copied."""


class BufferCatalogue(LocalState[Buffer]):
    """Ranks read all that they hold, each by itself: what several hold alike is saved once, and read by each, as this
    knows no way to hand arrays from rank to rank."""

    def __init__(
        self, arrays: Mapping[str, Buffer | ArrayShard], own: Mapping[str, Buffer], rank: int, world: int
    ) -> None:
        """`arrays`: by names that all ranks know, each Buffer the same on all ranks. `own`: bytes that this rank alone
        has, by names of its own. Raises InvalidInput for what can't be saved."""
        everyone = Copies(tuple(range(world)), rank)
        held = [_held(name, array, everyone) for name, array in sorted(arrays.items())]
        alone = [(own_chunk(name, each.dtype, each.shape), each) for name, each in own.items()]
        super().__init__(held, alone, f"{world}, buffers")
        self.saved = Buffers(self.layout, self._saved)
        self._addresses = {each.name: each.local.address for each in held} | {name: own[name].address for name in own}

    @property
    def alone(self) -> bool:
        """See LocalState."""
        return all(len(each.copies.ranks) == 1 for each in self.held)

    def wanted(self) -> dict[str, tuple[Chunk, Buffer]]:
        """See LocalState."""
        whole = (each.part(0, each.box.shape[0] if each.whole else 1) for each in self.held)
        return {chunk.name: (chunk, buffer) for chunk, buffer in whole}

    def still(self, arrays: Mapping[str, Buffer | ArrayShard]) -> bool:
        """Whether these are the very arrays that it was made of."""
        return arrays.keys() == self._addresses.keys() and all(
            _buffer(array).address == self._addresses[name] for name, array in arrays.items()
        )

    def fill(self, plan: ReadPlan, shards: Mapping[int, ShardReader]) -> None:
        """All arrays."""
        wanted = self.wanted()
        filling.execute(plan, shards, lambda item: _place(item, wanted[item.target.name][1]))


def _buffer(array: Buffer | ArrayShard) -> Buffer:
    found = array.array if isinstance(array, ArrayShard) else array
    assert isinstance(found, Buffer)
    return found


def _held(name: str, array: Buffer | ArrayShard, everyone: Copies) -> LocalArray[Buffer]:
    buffer = _buffer(array)
    if isinstance(array, ArrayShard):
        return held_part(name, array, buffer, buffer.shape, buffer.dtype)
    whole = buffer.shape
    return LocalArray(name, whole, Box((0,) * len(whole), whole), buffer.dtype, buffer, everyone, "whole")


def _place(item: ReadItem, buffer: Buffer) -> Place:
    """Read where it belongs, if the bytes lie there as they do in the file; else copied there, stretch by stretch."""
    found = _stretches(item.box, item.rows, Box.of(item.target), ITEM_SIZES[item.dtype])
    first = list(itertools.islice(found, 2))
    if item.rows == item.box and len(first) == 1:
        _, begin, size = first[0]
        return buffer.memory[begin : begin + size], None
    read = memoryview(bytearray(item.size))

    def take() -> None:
        for source, begin, size in itertools.chain(first, found):
            buffer.memory[begin : begin + size] = read[source : source + size]

    return read, take


def _stretches(box: Box, source: Box, target: Box, width: int) -> Iterator[tuple[int, int, int]]:
    """Of elements of `width` bytes that two arrays hold: where each stretch that lies together in both begins in the
    one and in the other, and how long it is, in bytes."""
    axis = len(box.shape)
    while axis and box.shape[axis:] == source.shape[axis:] == target.shape[axis:]:
        axis -= 1  # all that is further in is whole in both
    size = math.prod(box.shape[axis:]) * width
    for index in itertools.product(
        *(range(o, o + n) for o, n in zip(box.offsets[:axis], box.shape[:axis], strict=True))
    ):
        at = (*index, *box.offsets[axis:])
        yield _begin(at, source) * width, _begin(at, target) * width, size


def _begin(at: Sequence[int], outer: Box) -> int:
    """Which element of an array that holds `outer`."""
    found = 0
    for place, offset, length in zip(at, outer.offsets, outer.shape, strict=True):
        found = found * length + place - offset
    return found
