"""Communication between the ranks of a job about what they save, and its implementation for `State(gather=...)`."""

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
    "its ranks communicate through torch.distributed, so leave out State(gather=...), and import torch "
    "before you create State"
)
DIGEST_BITS = 38
Gather = Callable[[bytes], Sequence[bytes]]
"""Takes the bytes of this rank and returns those of all ranks, in their order. Every rank makes each call."""


class StateIndex(Protocol):
    """Arrays of a state that this rank holds, and the parts of them that it saves (see `concertina_state.holdings`)."""

    digest: str

    @property
    def saved(self) -> SnapshotSource: ...

    @property
    def alone(self) -> bool:
        """True if this rank reads exactly those parts of arrays that it also saves.

        In that case, a rank restores from the one shard with its own number, unless the number of ranks has changed.
        """
        ...

    def still(self, arrays: Mapping[str, Any], /) -> bool:
        """Return whether `arrays` are the same array objects from which this index was made.

        If they are, the next snapshot can use this index again.
        """
        ...

    def plan(self, held: Mapping[int, Header], instead: str) -> ReadPlan:
        """Return which parts of a saved state this rank reads.

        Args:
            held: Headers of the saved shards, keyed by the shard's number.
            instead: Advice for an error message.
        """
        ...

    def fill(self, plan: ReadPlan, shards: Mapping[int, ShardReader]) -> None:
        """Read the parts that a plan lists, and write them into this rank's arrays."""
        ...


class Ranks(Protocol):
    """Communication between the ranks of this job.

    Every rank must make the calls that communicate with other ranks, in the same order.
    """

    with_torch: bool
    """True if tensors of torch can be saved."""

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum over all ranks of each number."""
        ...

    def same(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        ...

    def array(self, array: Any, name: str) -> Any:
        """Return an array in the form that a state index requires. The result shares the array's memory.

        Args:
            array: A tensor, a Buffer, or an ArrayShard of one.
            name: Name of the array in an error message.
        """
        ...

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        """Return the names of the arrays whose content differs between ranks."""
        ...

    def memory(self, data: bytearray) -> Any:
        """Return `data` as an array of bytes that shares the memory of `data`."""
        ...

    def digest(self, buffers: Mapping[str, Any]) -> int:
        """Return a checksum of DIGEST_BITS bits, computed from the names, shapes and contents of the buffers."""
        ...

    def fill_own(self, buffers: Mapping[str, Any], shard: ShardReader, prefix: str) -> None:
        """Read buffers that each rank has saved for itself, and write the saved content into this rank's buffers.

        Args:
            buffers: The buffers to fill, by name.
            shard: The shard that contains the saved buffers.
            prefix: Prefix of each buffer's name in the shard.

        Raises:
            InvalidInput: A buffer was not saved, or has another shape or dtype.
        """
        ...

    def index(self, arrays: Mapping[str, Any], buffers: Mapping[str, Any], own: Mapping[str, Any]) -> StateIndex:
        """Return the index of a state, which describes the arrays that this rank saves and reads.

        Args:
            arrays: Arrays that several ranks share, keyed by names that are the same on all ranks.
            buffers: Buffers with the same content on all ranks, keyed by name.
            own: Arrays that only this rank has, keyed by names that no other rank uses.
        """
        ...


def all_alike(size: int, total: float, total_of_squares: float) -> bool:
    """Return whether all ranks have the same whole number, given two sums over the ranks.

    By the Cauchy-Schwarz inequality, the numbers are the same if and only if `size * total_of_squares == total ** 2`.

    Args:
        size: Number of ranks.
        total: Sum of the ranks' numbers.
        total_of_squares: Sum of the squares of the ranks' numbers.
    """
    return size * round(total_of_squares) == round(total) ** 2


def halves(digest: int) -> list[float]:
    """Split a digest into two numbers, and return each of them followed by its square.

    The numbers are so small that their sums over thousands of ranks are exact (see `all_alike`).
    """
    low, high = digest % (1 << DIGEST_BITS // 2), digest >> DIGEST_BITS // 2
    return [float(low), float(low**2), float(high), float(high**2)]


class GatheringRanks:
    """Communication between ranks by the script's function `gather`, without torch."""

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
            raise InvalidInput(f"{name} contains a tensor of torch: {LEAVE_OUT}.")
        return ArrayShard(buffer, array.offsets, array.shape) if isinstance(array, ArrayShard) else buffer

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        names = sorted(arrays)
        checksums = [zlib.crc32(arrays[name].memory) for name in names]
        form = f"<{len(checksums)}I"
        packed = self._gather(hashlib.sha256(repr(names).encode()).digest() + struct.pack(form, *checksums))
        if len({data[:32] for data in packed}) > 1:
            raise InvalidInput("ranks have arrays of different names: give State the same objects on all ranks.")
        columns = zip(*(struct.unpack(form, data[32:]) for data in packed))
        return [name for name, column in zip(names, columns) if len(set(column)) > 1]

    def memory(self, data: bytearray) -> Buffer:
        return Buffer("U8", (len(data),), memoryview(data))

    def digest(self, buffers: Mapping[str, Any]) -> int:
        return 0  # only torch's modules have buffers

    def fill_own(self, buffers: Mapping[str, Any], shard: ShardReader, prefix: str) -> None:
        """Do nothing, because only torch's modules have buffers."""

    def index(self, arrays: Mapping[str, Any], buffers: Mapping[str, Any], own: Mapping[str, Any]) -> BufferCatalogue:
        return BufferCatalogue(arrays, own, self._world.rank, self._world.size)

    def _gather(self, data: bytes, size: int | None = None) -> list[bytes]:
        """Gather the bytes of all ranks by the script's function, and check the function's result.

        If `size` is not None, the bytes of every rank must have that length.

        Raises:
            InvalidInput: The function did not return the bytes of each rank.
        """
        answers = [bytes(answer) for answer in self._gather_bytes(data)]
        sizes = {len(answer) for answer in answers}
        if len(answers) != self._world.size or (size is not None and sizes != {size}):
            raise InvalidInput(
                f"gather() must return one answer from each of the {self._world.size} ranks, in the order "
                f"of ranks: it returned {len(answers)} answers of {sorted(sizes)} bytes."
            )
        return answers
