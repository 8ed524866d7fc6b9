"""Arrays of a state that one rank holds, of any library. No torch.

This module describes which box of which global array each array is, which part of it this rank saves, and which part it
reads again. Arrays that several ranks hold alike (DDP's weights, a replicated dimension of a mesh) are saved once: each
of these ranks saves a part.
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
    """Array of a library. `array[begin:end]` is a range of its rows in the same memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Any: ...


A = TypeVar("A", bound=Rows)


@dataclasses.dataclass(frozen=True)
class Copies:
    """Ranks that hold the same boxes."""

    ranks: tuple[int, ...]
    """Ranks in the order in which parts are assigned to them."""
    mine: int
    """Index of this rank in `ranks`."""
    group: Any = None
    """Process group of torch.distributed of exactly these ranks. None: the world, or no communication."""
    saved_whole: bool = False
    """Whether the first rank saves each array whole, rather than each rank a part."""


ALONE = Copies((0,), 0)


@dataclasses.dataclass(frozen=True)
class LocalArray(Generic[A]):
    """Array of which this rank has a box."""

    name: str
    whole: tuple[int, ...]
    box: Box
    dtype: str
    """Name of the dtype in safetensors."""
    local: A
    """Live array of the box's shape."""
    copies: Copies
    cut: str
    """Description of how the array is cut."""

    def part(self, begin: int, end: int) -> tuple[Chunk, A]:
        """Return the rows [begin, end) of the local box, as a chunk and an array."""
        if not self.whole:
            return Chunk(self.name, self.dtype, (), (), ()), self.local
        offsets = (self.box.offsets[0] + begin, *self.box.offsets[1:])
        shape = (end - begin, *self.box.shape[1:])
        return Chunk(self.name, self.dtype, offsets, shape, self.whole), self.local[begin:end]


@dataclasses.dataclass(frozen=True)
class ArrayShard:
    """Box of a global array that this rank holds, for arrays that do not say themselves how they are cut."""

    array: Any
    offsets: Sequence[int]
    """Coordinates of the box's first element in the global array."""
    shape: Sequence[int]
    """Shape of the global array."""


@dataclasses.dataclass(frozen=True)
class RemoteArray:
    """Array of the state of which this rank holds nothing, such as the weights of another pipeline stage."""

    shape: Sequence[int]
    dtype: Any


def held_part(name: str, part: ArrayShard, local: A, shape: Sequence[int], dtype: str) -> LocalArray[A]:
    """Return the local array of an ArrayShard; `local`, `shape` and `dtype` are those of its array.

    Raises:
        InvalidInput: When the box is not within the global array.
    """
    offsets, own, whole = tuple(part.offsets), tuple(shape), tuple(part.shape)
    fits = len(offsets) == len(own) == len(whole) > 0
    if not fits or any(o < 0 or o + n > end for o, n, end in zip(offsets, own, whole)):
        raise InvalidInput(
            f"{name} is said to be a box of {list(own)} at {list(offsets)} of an array of {list(whole)}, which it is "
            "not within: correct its ArrayShard."
        )
    # Each array can have the same size in a world that is cut in another way. Only its box tells the two states apart.
    return LocalArray(name, whole, Box(offsets, own), dtype, local, ALONE, f"{offsets} {own}")


def own_chunk(name: str, dtype: str, shape: Sequence[int]) -> Chunk:
    """Return the chunk of an array that only one rank has."""
    return Chunk(name, dtype, (0,) * len(shape), tuple(shape), tuple(shape))


class LocalState(Generic[A]):
    """State as one rank holds it: its arrays, and the parts of them that this rank saves and reads."""

    def __init__(
        self, held: Sequence[LocalArray[A]], own: Sequence[tuple[Chunk, A]], cut: str, whole_cut: str = ""
    ) -> None:
        """Assign parts and lay out the shard of this rank.

        Args:
            held: Arrays of the state, of each of which this rank has a box.
            own: Arrays that only this rank has, by names of their own.
            cut: Description of how the whole state is cut. It tells apart states of ranks that hold the same arrays.
            whole_cut: Description of how each array is cut on all ranks. Without it, each array's own description
                counts, which is the same everywhere only if all ranks have a box of each array.
        """
        self.held = held
        self._parts: dict[str, tuple[Chunk, A]] = {}
        """Parts of the arrays that this rank saves, by name."""
        for copies, same_arrays in self._by_copies().items():
            self._parts |= {chunk.name: (chunk, array) for chunk, array in parts(same_arrays, copies, copies.mine)}
        saved = {**self._parts, **{chunk.name: (chunk, array) for chunk, array in own}}
        self.layout = Layout([chunk for chunk, _ in saved.values()])
        self._saved: list[A] = [saved[chunk.name][1] for chunk in self.layout.chunks]
        """Arrays in the order of the layout."""
        wholes = [(local_array.name, local_array.dtype, local_array.whole) for local_array in held]
        self.digest = layout_digest(wholes, f"{cut}: {whole_cut or sorted({local_array.cut for local_array in held})}")

    @property
    def alone(self) -> bool:
        """Whether this rank reads exactly what it saves.

        If the world was not resized, all of that is in the shard of the rank's own number.
        """
        return True

    def wanted(self) -> dict[str, tuple[Chunk, A]]:
        """Return the chunks that this rank reads from a saved state, with the arrays that they go into."""
        return self._parts

    def plan(self, headers: Mapping[int, Header], instead: str) -> ReadPlan:
        """Plan what this rank reads from a saved state.

        Args:
            held: Headers of the saved state's shards, by number.
            instead: Advice for the error message.

        Raises:
            InvalidInput: When the saved state is not a whole state of these arrays.
        """
        chunks = [chunk for chunk, _ in self.wanted().values()]
        for header in headers.values():
            for chunk in chunks:
                stored = header.chunks.get(chunk.name)
                if stored and (stored.chunk.global_shape, stored.chunk.dtype) != (chunk.global_shape, chunk.dtype):
                    raise InvalidInput(
                        f"{chunk.name} was saved as {stored.chunk.dtype} {list(stored.chunk.global_shape)} and is "
                        f"{chunk.dtype} {list(chunk.global_shape)} now: {instead}."
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
    """Return the parts that rank number `number` of the ranks in `copies` saves of the arrays that they hold alike."""
    if copies.saved_whole:
        return (
            [local_array.part(0, local_array.box.shape[0] if local_array.whole else 1) for local_array in same_arrays]
            if number == 0
            else []
        )
    boxes = [(local_array.box.shape, ITEM_SIZES[local_array.dtype]) for local_array in same_arrays]
    shares = zip(same_arrays, rows(boxes, len(copies.ranks), number))
    return [local_array.part(begin, end) for local_array, (begin, end) in shares if end > begin]
