"""Arrays in plain memory, saved and filled without torch.

Arrays of numpy and of the standard library are in plain memory. JAX provides such arrays on request.
"""

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
"""Names of dtypes in safetensors. The key is the dtype's name in numpy, or in ml_dtypes for dtypes that numpy lacks."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Array of one dtype in contiguous memory, row-major."""

    dtype: str
    """Name of the dtype in safetensors."""
    shape: tuple[int, ...]
    memory: memoryview
    """Writable view of the array's own bytes."""

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
    """Contents of a shard: arrays in memory, and the position of each array in the shard's file."""

    def __init__(self, layout: Layout, buffers: Sequence[Buffer]) -> None:
        """Record the arrays of a shard. The order of `buffers` is that of the chunks in `layout`."""
        self.layout, self._buffers = layout, buffers

    def views(self, file: mmap) -> list[memoryview]:
        """Return a view of the bytes of each array in the mapped file `file`. `copy_to` writes into these views."""
        whole = memoryview(file)
        begins = zip(self.layout.chunks, self.layout.begins)
        return [whole[begin : begin + chunk.size] for chunk, begin in begins]

    def copy_to(self, views: Sequence[memoryview]) -> Arrival:
        """Copy the present contents of the arrays into the views of the file.

        The copy is complete when this method returns. The returned function therefore does nothing and returns 0
        seconds. (In other classes, it waits for the end of a copy in the background.)
        """
        for view, buffer in zip(views, self._buffers):
            view[:] = buffer.memory
        return lambda: 0.0

    def before_change(self) -> None:
        """Do nothing, because `copy_to` has already finished its copies.

        Other classes copy in the background, and use this method to delay changes of arrays until their copies are
        complete.
        """


class BufferCatalogue(LocalState[Buffer]):
    """Index of arrays in plain memory.

    If several ranks have the same array, it is saved once. Each rank reads all its arrays by itself, because this class
    cannot send arrays from rank to rank.
    """

    def __init__(
        self, arrays: Mapping[str, Buffer | ArrayShard], own: Mapping[str, Buffer], rank: int, world: int
    ) -> None:
        """Record the arrays of this rank, and choose the parts that this rank saves.

        Args:
            arrays: Arrays, keyed by names that are the same on all ranks. A Buffer is the same on all ranks.
            own: Buffers that only this rank has, keyed by names that no other rank uses.
            rank: This rank.
            world: Number of ranks.

        Raises:
            InvalidInput: When an array can't be saved.
        """
        everyone = Copies(tuple(range(world)), rank)
        local_arrays = [_local_array(name, array, everyone) for name, array in sorted(arrays.items())]
        alone = [(own_chunk(name, buffer.dtype, buffer.shape), buffer) for name, buffer in own.items()]
        super().__init__(local_arrays, alone, f"{world}, buffers")
        self.saved = Buffers(self.layout, self._saved)
        self._addresses = {local_array.name: local_array.local.address for local_array in local_arrays} | {
            name: own[name].address for name in own
        }

    @property
    def alone(self) -> bool:
        """True if this rank reads exactly those parts of arrays that it also saves.

        In that case, a rank restores from its own shard alone, unless the number of ranks has changed (see
        `LocalState.alone`).
        """
        return all(len(local_array.copies.ranks) == 1 for local_array in self.held)

    def wanted(self) -> dict[str, tuple[Chunk, Buffer]]:
        """Return the box to read in a restore, and the array to read it into, keyed by the array's name.

        A box is a rectangular part of a global array. Here it is always the whole box that this rank has (see
        `LocalState.wanted`).
        """
        whole = (local_array.part(0, local_array.box.shape[0] if local_array.whole else 1) for local_array in self.held)
        return {chunk.name: (chunk, buffer) for chunk, buffer in whole}

    def still(self, arrays: Mapping[str, Buffer | ArrayShard]) -> bool:
        """Return whether `arrays` are the same array objects that this catalogue was made from.

        If they are, the next snapshot can use this catalogue again.
        """
        return arrays.keys() == self._addresses.keys() and all(
            _buffer(array).address == self._addresses[name] for name, array in arrays.items()
        )

    def fill(self, plan: ReadPlan, shards: Mapping[int, ShardReader]) -> None:
        """Read all arrays of this rank."""
        chunks = self.wanted()
        filling.execute(plan, shards, lambda item: _place_for(item, chunks[item.target.name][1]))


def _buffer(array: Buffer | ArrayShard) -> Buffer:
    buffer = array.array if isinstance(array, ArrayShard) else array
    assert isinstance(buffer, Buffer)
    return buffer


def _local_array(name: str, array: Buffer | ArrayShard, everyone: Copies) -> LocalArray[Buffer]:
    buffer = _buffer(array)
    if isinstance(array, ArrayShard):
        return held_part(name, array, buffer, buffer.shape, buffer.dtype)
    whole = buffer.shape
    return LocalArray(name, whole, Box((0,) * len(whole), whole), buffer.dtype, buffer, everyone, "whole")


def _place_for(item: ReadItem, buffer: Buffer) -> Place:
    """Return the memory for the bytes of `item`, and a function that copies them into `buffer` afterwards, or None.

    If the bytes have the same order in the buffer as in the file, they are read directly into the buffer, and the
    function is None. Otherwise, they are read into separate memory, and the function copies one contiguous stretch at a
    time.
    """
    found = stretches(item.box, item.rows, Box.of(item.target), ITEM_SIZES[item.dtype])
    first = list(itertools.islice(found, 2))
    if item.rows == item.box and len(first) == 1:
        _, begin, size = first[0]
        return buffer.memory[begin : begin + size], None
    read = memoryview(bytearray(item.size))

    def take() -> None:
        for source, begin, size in itertools.chain(first, found):
            buffer.memory[begin : begin + size] = read[source : source + size]

    return read, take


def stretches(box: Box, source: Box, target: Box, width: int) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous stretches of the elements of `box`, a region that two arrays both contain.

    The elements of a stretch are contiguous in both arrays, so they can be copied in one piece.

    Args:
        box: Elements that are in both arrays.
        source: Box that the first array is of the global tensor.
        target: Box that the second array is of the global tensor.
        width: Size of an element in bytes.

    Yields:
        Offset of a stretch in the first array, offset of the stretch in the second array, and length of the stretch,
        all in bytes.
    """
    axis = len(box.shape)
    while axis and box.shape[axis:] == source.shape[axis:] == target.shape[axis:]:
        axis -= 1  # both arrays contain the inner dimensions as a whole
    size = math.prod(box.shape[axis:]) * width
    for index in itertools.product(*(range(o, o + n) for o, n in zip(box.offsets[:axis], box.shape[:axis]))):
        coordinate = (*index, *box.offsets[axis:])
        yield _begin(coordinate, source) * width, _begin(coordinate, target) * width, size


def _begin(coordinate: Sequence[int], outer: Box) -> int:
    """Return the index, within an array, of the element at a global coordinate.

    `outer` is the part (box) of the global tensor that the array contains.
    """
    index = 0
    for position, offset, length in zip(coordinate, outer.offsets, outer.shape):
        index = index * length + position - offset
    return index
