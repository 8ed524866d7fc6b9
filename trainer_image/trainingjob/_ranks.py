"""How the processes of a world agree on what is saved, where that is not torch.distributed's."""

from __future__ import annotations

import hashlib
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from concertina_state.buffers import Buffer, BufferCatalogue
from concertina_state.errors import BadInput
from concertina_state.filling import ShardReader
from concertina_state.format.read_plan import ReadPlan
from concertina_state.format.shardfile import Header
from concertina_state.holdings import ArrayShard
from concertina_state.live import Live
from trainingjob import World

LEAVE_OUT = (
    "its ranks agree by torch.distributed, so leave out State(gather=...), and import torch before State is made"
)
DIGEST_BITS = 38
Gather = Callable[[bytes], Sequence[bytes]]
"""What all ranks give, in their order; each call on all ranks."""


class Catalogue(Protocol):
    """The arrays of a state, as this rank has them; see concertina_state.holdings."""

    digest: str

    @property
    def saved(self) -> Live: ...

    @property
    def alone(self) -> bool:
        """Whether this rank finds all that it reads in the shard of its own number, where nothing was resized."""
        ...

    def still(self, arrays: Mapping[str, Any], /) -> bool: ...

    def plan(self, held: Mapping[int, Header], instead: str) -> ReadPlan: ...

    def fill(self, plan: ReadPlan, shards: Mapping[int, ShardReader]) -> None: ...


class Ranks(Protocol):
    with_torch: bool

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Over all ranks."""
        ...

    def same(self, value: Any) -> Any:
        """Rank 0's, on all ranks."""
        ...

    def array(self, array: Any, name: str) -> Any:
        """A tensor, a Buffer, or an ArrayShard of one, with the same memory. `name`: for an error."""
        ...

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        """Names of those that are not the same on all ranks."""
        ...

    def memory(self, data: bytearray) -> Any:
        """Return an array of bytes over this memory."""
        ...

    def digest(self, buffers: Mapping[str, Any]) -> int:
        """Return a checksum of names, shapes and contents, of DIGEST_BITS bits."""
        ...

    def fill_own(self, buffers: Mapping[str, Any], shard: ShardReader, prefix: str) -> None:
        """Read buffers that a rank saved for itself: `prefix` and their names. Raises BadInput if they are others."""
        ...

    def catalogue(self, arrays: Mapping[str, Any], buffers: Mapping[str, Any], own: Mapping[str, Any]) -> Catalogue:
        """See concertina_state."""
        ...


def all_alike(size: int, total: float, total_of_squares: float) -> bool:
    """Whether `size` whole numbers of these sums are all the same: by Cauchy and Schwarz, if and only if."""
    return size * round(total_of_squares) == round(total) ** 2


def halves(digest: int) -> list[float]:
    """Return two numbers whose squares can be added up over thousands of ranks exactly, each with its square."""
    low, high = digest % (1 << DIGEST_BITS // 2), digest >> DIGEST_BITS // 2
    return [float(low), float(low**2), float(high), float(high**2)]


def ranks(world: World, gather: Gather | None) -> Ranks:
    """Raises BadInput where there are several, and no way to agree."""
    if gather is None and "torch" in sys.modules:
        from trainingjob._torch_ranks import TorchRanks

        return TorchRanks(world)
    if gather is None and world.size > 1:
        raise BadInput(
            f"{world.size} processes keep one state, and nothing says how they agree: import torch and call "
            "torch.distributed.init_process_group() before State is made, or give State(gather=...), a function that "
            "takes each rank's bytes and returns those of all (MPI.COMM_WORLD.allgather, trainingjob.jax.gather)."
        )
    return GatheringRanks(world, gather or (lambda data: [data]))


class GatheringRanks:
    with_torch = False

    def __init__(self, world: World, gather: Gather) -> None:
        self._world, self._gather_bytes = world, gather

    def sums(self, numbers: Sequence[float]) -> list[float]:
        form = f"<{len(numbers)}d"
        found = self._gather(struct.pack(form, *numbers), struct.calcsize(form))
        return [sum(each) for each in zip(*(struct.unpack(form, data) for data in found), strict=True)]

    def same(self, value: Any) -> Any:
        mine = pickle.dumps(value) if self._world.rank == 0 else b""
        return pickle.loads(self._gather(mine)[0])

    def array(self, array: Any, name: str) -> Buffer | ArrayShard:
        found = array.array if isinstance(array, ArrayShard) else array
        if not isinstance(found, Buffer):
            raise BadInput(f"{name} holds a tensor of torch's: {LEAVE_OUT}.")
        return ArrayShard(found, array.offsets, array.shape) if isinstance(array, ArrayShard) else found

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        names = sorted(arrays)
        sums = [zlib.crc32(arrays[name].memory) for name in names]
        found = self._gather(hashlib.sha256(repr(names).encode()).digest() + struct.pack(f"<{len(sums)}I", *sums))
        if len({data[:32] for data in found}) > 1:
            raise BadInput("the ranks keep arrays of other names: give State the same ones on all ranks.")
        of_all = zip(*(struct.unpack(f"<{len(sums)}I", data[32:]) for data in found), strict=True)
        return [name for name, each in zip(names, of_all, strict=True) if len(set(each)) > 1]

    def memory(self, data: bytearray) -> Buffer:
        return Buffer("U8", (len(data),), memoryview(data))

    def digest(self, buffers: Mapping[str, Any]) -> int:
        return 0  # only torch's modules have buffers

    def fill_own(self, buffers: Mapping[str, Any], shard: ShardReader, prefix: str) -> None:
        """There are none."""

    def catalogue(
        self, arrays: Mapping[str, Any], buffers: Mapping[str, Any], own: Mapping[str, Any]
    ) -> BufferCatalogue:
        return BufferCatalogue(arrays, own, self._world.rank, self._world.size)

    def _gather(self, data: bytes, size: int | None = None) -> list[bytes]:
        found = [bytes(each) for each in self._gather_bytes(data)]
        sizes = {len(each) for each in found}
        if len(found) != self._world.size or (size is not None and sizes != {size}):
            raise BadInput(
                f"gather() has to return what each of the {self._world.size} ranks gave, in their order: it returned "
                f"{len(found)} answers of {sorted(sizes)} bytes."
            )
        return found
