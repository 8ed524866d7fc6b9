"""Arrays of a state that one rank has, as boxes (rectangular parts) of global arrays, for arrays of any library.

For each array, this module describes three things: the array's box in the global array, the part that this rank saves,
and the part that this rank reads in a restore.

If several ranks have the same array, each of these ranks saves a different part, so that the array is saved only once.
Examples are the weights with DDP, and a dimension of a mesh that replicates tensors. The module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import Box, ReadPlan, reads
from concertina_state.format.shardfile import ITEM_SIZES, Chunk, Header, Layout, layout_digest
from concertina_state.placement import rows


class Rows(Protocol):
    """Array of any library. The slice `array[begin:end]` is a view of its rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Any: ...


A = TypeVar("A", bound=Rows)


@dataclasses.dataclass(frozen=True)
class Copies:
    """Set of ranks that have identical parts of some arrays.

    The parts have to be saved only once, so each of these ranks saves a share of them.
    """

    ranks: tuple[int, ...]
    """Ranks in the order in which parts are assigned to them."""
    mine: int
    """Index of this rank in `ranks`."""
    group: Any = None
    """Process group of torch.distributed that consists of these ranks.

    None means that these ranks are the whole world, or that ranks can't communicate by torch.distributed.
    """
    saved_whole: bool = False
    """True if the first of these ranks saves each array whole. Otherwise each rank saves a part."""


ALONE = Copies((0,), 0)


@dataclasses.dataclass(frozen=True)
class LocalArray(Generic[A]):
    """Array on this rank, which is a box (rectangular part) of a global array, or the whole global array."""

    name: str
    whole: tuple[int, ...]
    box: Box
    dtype: str
    """Name of the dtype in safetensors."""
    local: A
    """The array itself. Its shape is that of `box`."""
    copies: Copies
    cut: str
    """Description of how ranks divide the global array."""

    def part(self, begin: int, end: int) -> tuple[Chunk, A]:
        """Return the rows from `begin` to `end` - 1 of the local array, as a chunk and an array.

        The chunk is the box of these rows in the global array. The returned array contains the elements of the rows.
        """
        if not self.whole:
            return Chunk(self.name, self.dtype, (), (), ()), self.local
        offsets = (self.box.offsets[0] + begin, *self.box.offsets[1:])
        shape = (end - begin, *self.box.shape[1:])
        return Chunk(self.name, self.dtype, offsets, shape, self.whole), self.local[begin:end]


@dataclasses.dataclass(frozen=True)
class ArrayShard:
    """Local array with its position in a global array, for libraries whose arrays do not know this position."""

    array: Any
    offsets: Sequence[int]
    """Coordinates in the global array of the local array's first element."""
    shape: Sequence[int]
    """Shape of the global array."""


@dataclasses.dataclass(frozen=True)
class RemoteArray:
    """Array of the state of which this rank has no part, such as the weights of another pipeline stage."""

    shape: Sequence[int]
    dtype: Any


def held_part(name: str, part: ArrayShard, local: A, shape: Sequence[int], dtype: str) -> LocalArray[A]:
    """Return the LocalArray for an ArrayShard, which declares the part (box) of an array that this rank has.

    `shape` and `dtype` are those of `local`, which contains the elements of the box.

    Raises:
        InvalidInput: When the box is not within the global array.
    """
    offsets, own, whole = tuple(part.offsets), tuple(shape), tuple(part.shape)
    fits = len(offsets) == len(own) == len(whole) > 0
    if not fits or any(o < 0 or o + n > end for o, n, end in zip(offsets, own, whole)):
        raise InvalidInput(
            f"{name} is declared as a box of {list(own)} at {list(offsets)} of an array of {list(whole)}, "
            "which is too small: correct its ArrayShard."
        )
    # If a world divides the array in another way, the local arrays can still have the same sizes. So the box, and not
    # only the size, must identify the division.
    return LocalArray(name, whole, Box(offsets, own), dtype, local, ALONE, f"{offsets} {own}")


def own_chunk(name: str, dtype: str, shape: Sequence[int]) -> Chunk:
    """Return the chunk of an array that only one rank has. The chunk covers the whole array."""
    return Chunk(name, dtype, (0,) * len(shape), tuple(shape), tuple(shape))


class LocalState(Generic[A]):
    """Part of a state on one rank: the rank's arrays, and the parts of them that the rank saves and reads."""

    def __init__(
        self, held: Sequence[LocalArray[A]], own: Sequence[tuple[Chunk, A]], cut: str, whole_cut: str = ""
    ) -> None:
        """Choose the parts of the arrays that this rank saves, and assign each part a position in the shard file.

        Args:
            held: Arrays of the state of which this rank has a box.
            own: Arrays that only this rank has, keyed by names that no other rank uses.
            cut: Description of how ranks divide the whole state. It distinguishes states whose ranks have the same
                arrays.
            whole_cut: Description of how all ranks divide each array. If it is empty, the descriptions of the arrays in
                `held` are used. These descriptions are the same on all ranks only if each rank has a box of each array.
        """
        self.held = held
        self._parts: dict[str, tuple[Chunk, A]] = {}
        """Parts of the arrays that this rank saves, keyed by the array's name."""
        for copies, same_arrays in self._by_copies().items():
            self._parts |= {chunk.name: (chunk, array) for chunk, array in parts(same_arrays, copies, copies.mine)}
        saved = {**self._parts, **{chunk.name: (chunk, array) for chunk, array in own}}
        self.layout = Layout([chunk for chunk, _ in saved.values()])
        self._saved: list[A] = [saved[chunk.name][1] for chunk in self.layout.chunks]
        """Arrays that this rank saves, in the order of the layout."""
        wholes = [(local_array.name, local_array.dtype, local_array.whole) for local_array in held]
        self.digest = layout_digest(wholes, f"{cut}: {whole_cut or sorted({local_array.cut for local_array in held})}")

    @property
    def alone(self) -> bool:
        """True if this rank reads from a saved state exactly the parts that it would save.

        In that case, the rank restores from the one shard with its own number, unless the number of ranks has changed
        since the save.
        """
        return True

    def wanted(self) -> dict[str, tuple[Chunk, A]]:
        """Return the chunk that this rank reads of each array, with the array to read it into, keyed by name."""
        return self._parts

    def plan(self, headers: Mapping[int, Header], instead: str) -> ReadPlan:
        """Plan which bytes of a saved state this rank reads.

        Args:
            headers: Headers of the saved state's shards, keyed by the shard's number.
            instead: Advice for the error message: what to do instead of restoring this state.

        Raises:
            InvalidInput: When the saved state lacks a part of these arrays, or the shape or dtype of an array differs.
        """
        chunks = [chunk for chunk, _ in self.wanted().values()]
        for header in headers.values():
            for chunk in chunks:
                stored = header.chunks.get(chunk.name)
                if stored and (stored.chunk.global_shape, stored.chunk.dtype) != (chunk.global_shape, chunk.dtype):
                    raise InvalidInput(
                        f"{chunk.name} was saved as {stored.chunk.dtype} {list(stored.chunk.global_shape)} "
                        f"but is now {chunk.dtype} {list(chunk.global_shape)}: {instead}."
                    )
        plan = reads(headers, chunks)
        plan.require("the saved state")
        return plan

    def _by_copies(self) -> dict[Copies, list[LocalArray[A]]]:
        arrays_by_copies: dict[Copies, list[LocalArray[A]]] = {}
        for local_array in self.held:
            arrays_by_copies.setdefault(local_array.copies, []).append(local_array)
        return arrays_by_copies


def parts(same_arrays: Sequence[LocalArray[A]], copies: Copies, number: int) -> list[tuple[Chunk, A]]:
    """Return the parts of `same_arrays` that one of the ranks in `copies` saves.

    All ranks in `copies` have the same data. To save the data once, each of these ranks saves a different part.
    `number` is the index of the saving rank in `copies.ranks`.
    """
    if copies.saved_whole:
        return (
            [local_array.part(0, local_array.box.shape[0] if local_array.whole else 1) for local_array in same_arrays]
            if number == 0
            else []
        )
    boxes = [(local_array.box.shape, ITEM_SIZES[local_array.dtype]) for local_array in same_arrays]
    shares = zip(same_arrays, rows(boxes, len(copies.ranks), number))
    return [local_array.part(begin, end) for local_array, (begin, end) in shares if end > begin]
