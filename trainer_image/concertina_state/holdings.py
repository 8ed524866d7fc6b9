"""What one rank holds of a state's arrays, of whatever library: which box of which global array each is, what of it
this rank saves, and what it reads again. No torch.

What several ranks hold alike (DDP's weights, a replicated dimension of a mesh) is saved once: each of them saves a
part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import Box, ReadPlan, reads
from concertina_state.format.shardfile import ITEM_SIZES, Chunk, Header, Layout, layout_digest
from concertina_state.placement import rows


class Rows(Protocol):
    """An array of a library: `array[begin:end]` are some of its rows, the same memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Any: ...


A = TypeVar("A", bound=Rows)


@dataclasses.dataclass(frozen=True)
class Copies:
    """Ranks that hold the same boxes."""

    ranks: tuple[int, ...]
    """In the order in which parts are given to them."""
    mine: int
    """Place of this rank among them."""
    group: Any = None
    """Of exactly these, as torch.distributed has it; None: the world, or nobody to talk to."""
    saved_whole: bool = False
    """The first of them saves each array whole, rather than each of them a part."""


ALONE = Copies((0,), 0)


@dataclasses.dataclass(frozen=True)
class LocalArray(Generic[A]):
    """An array of which this rank has a box."""

    name: str
    whole: tuple[int, ...]
    box: Box
    dtype: str
    """As safetensors names it."""
    local: A
    """Live, of the box's shape."""
    copies: Copies
    cut: str
    """How it is cut."""

    def part(self, begin: int, end: int) -> tuple[Chunk, A]:
        """Some of its rows."""
        if not self.whole:
            return Chunk(self.name, self.dtype, (), (), ()), self.local
        offsets = (self.box.offsets[0] + begin, *self.box.offsets[1:])
        shape = (end - begin, *self.box.shape[1:])
        return Chunk(self.name, self.dtype, offsets, shape, self.whole), self.local[begin:end]


@dataclasses.dataclass(frozen=True)
class ArrayShard:
    """A box of a global array, where nothing else says how it is cut: what this rank holds of it."""

    array: Any
    offsets: Sequence[int]
    """Of its first element in the global array."""
    shape: Sequence[int]
    """Of the global array."""


@dataclasses.dataclass(frozen=True)
class RemoteArray:
    """An array of the state of which this rank has nothing: a pipeline stage's weights, on the others."""

    shape: Sequence[int]
    dtype: Any


def held_part(name: str, part: ArrayShard, local: A, shape: Sequence[int], dtype: str) -> LocalArray[A]:
    """`local`, `shape`, `dtype`: of the part's array. Raises InvalidInput."""
    offsets, own, whole = tuple(part.offsets), tuple(shape), tuple(part.shape)
    fits = len(offsets) == len(own) == len(whole) > 0
    if not fits or any(o < 0 or o + n > end for o, n, end in zip(offsets, own, whole, strict=True)):
        raise InvalidInput(
            f"{name} is said to be a box of {list(own)} at {list(offsets)} of an array of {list(whole)}, which it is "
            "not within: correct its ArrayShard."
        )
    # Each array may be as large in a world that is cut otherwise: only its box tells that state from this one.
    return LocalArray(name, whole, Box(offsets, own), dtype, local, ALONE, f"{offsets} {own}")


def own_chunk(name: str, dtype: str, shape: Sequence[int]) -> Chunk:
    """An array that one rank alone has."""
    return Chunk(name, dtype, (0,) * len(shape), tuple(shape), tuple(shape))


class LocalState(Generic[A]):
    def __init__(
        self, held: Sequence[LocalArray[A]], own: Sequence[tuple[Chunk, A]], cut: str, whole_cut: str = ""
    ) -> None:
        """`own`: arrays that this rank alone has, by names of its own. `cut`: how all of it is cut, as far as that
        tells states of ranks apart that hold the same arrays. `whole_cut`: how each array is cut on all ranks; else
        each says how, which is the same everywhere only where all ranks have some of each."""
        self.held = held
        self._parts: dict[str, tuple[Chunk, A]] = {}
        """Of those, what this rank saves."""
        for copies, alike in self._by_copies().items():
            self._parts |= {chunk.name: (chunk, array) for chunk, array in parts(alike, copies, copies.mine)}
        saved = {**self._parts, **{chunk.name: (chunk, array) for chunk, array in own}}
        self.layout = Layout([chunk for chunk, _ in saved.values()])
        self._saved: list[A] = [saved[chunk.name][1] for chunk in self.layout.chunks]
        """In the layout's order."""
        wholes = [(each.name, each.dtype, each.whole) for each in held]
        self.digest = layout_digest(wholes, f"{cut}: {whole_cut or sorted({each.cut for each in held})}")

    @property
    def alone(self) -> bool:
        """Whether what this rank reads is what it saves, which is in the shard of its own number where nothing was
        resized."""
        return True

    def wanted(self) -> dict[str, tuple[Chunk, A]]:
        """What this rank reads of a saved state."""
        return self._parts

    def plan(self, held: Mapping[int, Header], instead: str) -> ReadPlan:
        """What this rank reads, of a saved state of which these are the shards' headers. Raises InvalidInput where it
        is not a whole state of these arrays; `instead`: what to do then."""
        wanted = [chunk for chunk, _ in self.wanted().values()]
        for header in held.values():
            for chunk in wanted:
                stored = header.chunks.get(chunk.name)
                if stored and (stored.chunk.global_shape, stored.chunk.dtype) != (chunk.global_shape, chunk.dtype):
                    raise InvalidInput(
                        f"{chunk.name} was saved as {stored.chunk.dtype} {list(stored.chunk.global_shape)} and is "
                        f"{chunk.dtype} {list(chunk.global_shape)} now: {instead}."
                    )
        plan = reads(held, wanted)
        plan.require("the saved state")
        return plan

    def _by_copies(self) -> dict[Copies, list[LocalArray[A]]]:
        found: dict[Copies, list[LocalArray[A]]] = {}
        for each in self.held:
            found.setdefault(each.copies, []).append(each)
        return found


def parts(alike: Sequence[LocalArray[A]], copies: Copies, number: int) -> list[tuple[Chunk, A]]:
    """What rank `number` of those that hold them alike saves of each."""
    if copies.saved_whole:
        return [each.part(0, each.box.shape[0] if each.whole else 1) for each in alike] if number == 0 else []
    boxes = [(each.box.shape, ITEM_SIZES[each.dtype]) for each in alike]
    shares = zip(alike, rows(boxes, len(copies.ranks), number), strict=True)
    return [each.part(begin, end) for each, (begin, end) in shares if end > begin]
