"""Interface by which the ranks of a world agree on what they save, and its implementation for `State(gather=...)`."""

from __future__ import annotations

import hashlib
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from concertina_state.buffers import Buffer, BufferCatalogue
from concertina_state.errors import InvalidInput
from concertina_state.filling import ShardReader
from concertina_state.format.read_plan import ReadPlan
from concertina_state.format.shardfile import Header
from concertina_state.holdings import ArrayShard
from concertina_state.live import SnapshotSource
from trainingjob._world import World

LEAVE_OUT = (
    "its ranks agree by torch.distributed, so leave out State(gather=...), and import torch before State is made"
)
DIGEST_BITS = 38
Gather = Callable[[bytes], Sequence[bytes]]
"""Takes the bytes of this rank and returns those of all ranks, in their order. Every rank makes each call."""


class StateIndex(Protocol):
    """The arrays of a state as this rank holds them (see `concertina_state.holdings`)."""

    digest: str

    @property
    def saved(self) -> SnapshotSource: ...

    @property
    def alone(self) -> bool:
        """True if this rank reads only from the shard of its own number, as long as the world has not changed."""
        ...

    def still(self, arrays: Mapping[str, Any], /) -> bool:
        """Return whether these are the very arrays that the index was made of."""
        ...

    def plan(self, held: Mapping[int, Header], instead: str) -> ReadPlan:
        """Return what this rank reads of a saved state. `instead` is advice for an error."""
        ...

    def fill(self, plan: ReadPlan, shards: Mapping[int, ShardReader]) -> None:
        """Read the plan's arrays."""
        ...


class Ranks(Protocol):
    """The ranks of this world. Every rank makes each call that communicates with other ranks, in the same order."""

    with_torch: bool
    """Whether tensors of torch can be saved."""

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each number over all ranks."""
        ...

    def same(self, value: Any) -> Any:
        """Return the value of rank 0, on all ranks."""
        ...

    def array(self, array: Any, name: str) -> Any:
        """Return an array in the form that an index takes, with the same memory.

        Args:
            array: A tensor, a Buffer, or an ArrayShard of one.
            name: Name of the array in an error message.
        """
        ...

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        """Return the names of the arrays that do not have the same content on all ranks."""
        ...

    def memory(self, data: bytearray) -> Any:
        """Return an array of bytes with this memory."""
        ...

    def digest(self, buffers: Mapping[str, Any]) -> int:
        """Return a checksum of names, shapes and contents, of DIGEST_BITS bits."""
        ...

    def fill_own(self, buffers: Mapping[str, Any], shard: ShardReader, prefix: str) -> None:
        """Fill buffers that a rank has saved for itself.

        Args:
            buffers: The buffers to fill, by name.
            shard: The shard in which the rank has saved them.
            prefix: What stands before each name in the shard.

        Raises:
            InvalidInput: A buffer was not saved, or has another shape or dtype.
        """
        ...

    def index(self, arrays: Mapping[str, Any], buffers: Mapping[str, Any], own: Mapping[str, Any]) -> StateIndex:
        """Return the index of a state.

        Args:
            arrays: Arrays by names that all ranks know.
            buffers: Buffers that all ranks hold alike.
            own: Arrays of this rank alone, by names of its own.
        """
        ...


def all_alike(size: int, total: float, total_of_squares: float) -> bool:
    """Return whether whole numbers are all the same.

    By the inequality of Cauchy and Schwarz, this holds if and only if their number times the sum of their squares is
    the square of their sum.

    Args:
        size: How many numbers there are.
        total: Their sum.
        total_of_squares: The sum of their squares.
    """
    return size * round(total_of_squares) == round(total) ** 2


def halves(digest: int) -> list[float]:
    """Split a digest into two numbers, each with its square: small enough to sum exactly over thousands of ranks."""
    low, high = digest % (1 << DIGEST_BITS // 2), digest >> DIGEST_BITS // 2
    return [float(low), float(low**2), float(high), float(high**2)]


class GatheringRanks:
    """Ranks that agree by a function of the script, without torch."""

    with_torch = False

    def __init__(self, world: World, gather: Gather) -> None:
        self._world, self._gather_bytes = world, gather

    def sums(self, numbers: Sequence[float]) -> list[float]:
        form = f"<{len(numbers)}d"
        packed = self._gather(struct.pack(form, *numbers), struct.calcsize(form))
        return [sum(column) for column in zip(*(struct.unpack(form, data) for data in packed))]

    def same(self, value: Any) -> Any:
        own = pickle.dumps(value) if self._world.rank == 0 else b""
        return pickle.loads(self._gather(own)[0])

    def array(self, array: Any, name: str) -> Buffer | ArrayShard:
        buffer = array.array if isinstance(array, ArrayShard) else array
        if not isinstance(buffer, Buffer):
            raise InvalidInput(f"{name} holds a tensor of torch's: {LEAVE_OUT}.")
        return ArrayShard(buffer, array.offsets, array.shape) if isinstance(array, ArrayShard) else buffer

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        names = sorted(arrays)
        checksums = [zlib.crc32(arrays[name].memory) for name in names]
        form = f"<{len(checksums)}I"
        packed = self._gather(hashlib.sha256(repr(names).encode()).digest() + struct.pack(form, *checksums))
        if len({data[:32] for data in packed}) > 1:
            raise InvalidInput("the ranks keep arrays of other names: give State the same ones on all ranks.")
        columns = zip(*(struct.unpack(form, data[32:]) for data in packed))
        return [name for name, column in zip(names, columns) if len(set(column)) > 1]

    def memory(self, data: bytearray) -> Buffer:
        return Buffer("U8", (len(data),), memoryview(data))

    def digest(self, buffers: Mapping[str, Any]) -> int:
        return 0  # only torch's modules have buffers

    def fill_own(self, buffers: Mapping[str, Any], shard: ShardReader, prefix: str) -> None:
        """Do nothing: only torch's modules have buffers."""

    def index(self, arrays: Mapping[str, Any], buffers: Mapping[str, Any], own: Mapping[str, Any]) -> BufferCatalogue:
        return BufferCatalogue(arrays, own, self._world.rank, self._world.size)

    def _gather(self, data: bytes, size: int | None = None) -> list[bytes]:
        """Gather bytes, and check the answer of the script's function. `size` is that of each rank's bytes, if equal.

        Raises:
            InvalidInput: The function has not returned the bytes of each rank.
        """
        answers = [bytes(answer) for answer in self._gather_bytes(data)]
        sizes = {len(answer) for answer in answers}
        if len(answers) != self._world.size or (size is not None and sizes != {size}):
            raise InvalidInput(
                f"gather() has to return what each of the {self._world.size} ranks gave, in their order: it returned "
                f"{len(answers)} answers of {sorted(sizes)} bytes."
            )
        return answers
