"""Implementation of `Ranks` by torch.distributed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from concertina_state.buffers import Buffer
from concertina_state.errors import InvalidInput
from concertina_state.filling import ShardReader
from concertina_state.holdings import ArrayShard
from concertina_state.state_index import StateIndex, live
from concertina_state.tensors import DTYPES, NAMES, memory
from trainingjob._ranks import DIGEST_BITS, all_alike, halves
from trainingjob._refusals import INSTEAD
from trainingjob._world import World

PIECE = 1 << 24
"""Number of elements that are summed at a time."""


class TorchRanks:
    """Communication between ranks by collectives of torch's default process group. See `Ranks`."""

    with_torch = True

    def __init__(self, world: World) -> None:
        self._world = world
        self._several = world.size > 1
        self._checksums: dict[str, tuple[tuple[int, int] | None, int]] = {}
        """Version and checksum of each buffer, keyed by the buffer's name. The version is None if torch counts none."""
        if self._several and not dist.is_initialized():
            raise InvalidInput(
                f"{world.size} processes share one state, but can't communicate yet: call "
                "torch.distributed.init_process_group() before you create State, or use State(gather=...)."
            )

    def sums(self, numbers: Sequence[float]) -> list[float]:
        if not self._several:
            return list(numbers)
        payload = torch.tensor(numbers, dtype=torch.float64, device=_device())
        dist.all_reduce(payload)
        totals: list[float] = payload.tolist()
        return totals

    def same(self, value: Any) -> Any:
        if not self._several:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=_device())
        return box[0]

    def array(self, array: Any, name: str) -> Tensor | ArrayShard:
        tensor = _tensor(array.array if isinstance(array, ArrayShard) else array)
        if live(tensor).is_meta:
            raise InvalidInput(
                f"{name} is on the meta device, so it has no content to save: materialize it (to_empty)."
            )
        return ArrayShard(tensor, array.offsets, array.shape) if isinstance(array, ArrayShard) else tensor

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        """Return the names of the arrays that differ between ranks.

        Only the sums of the arrays are compared, so that only these sums are copied from the device.

        Raises:
            InvalidInput: The ranks have arrays of other names.
        """
        if not self._several:
            return []
        names_digest = halves(_bits(zlib.crc32(repr(sorted(arrays)).encode()), len(arrays)))
        low, low2, high, high2 = self.sums(names_digest)
        if not (all_alike(self._world.size, low, low2) and all_alike(self._world.size, high, high2)):
            raise InvalidInput("ranks have arrays of different names: give State the same objects on all ranks.")
        if not arrays:
            return []
        least = torch.stack([_sum(array).to(_device()) for array in arrays.values()])
        most = -least
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MIN)
        bounds = zip(arrays, least.tolist(), (-most).tolist())
        return [name for name, low, high in bounds if low != high and not (math.isnan(low) and math.isnan(high))]

    def memory(self, data: bytearray) -> Tensor:
        return torch.frombuffer(data, dtype=torch.uint8)

    @torch.no_grad()
    def digest(self, buffers: Mapping[str, Tensor]) -> int:
        """Return a checksum of the buffers. Buffers that have not changed since the last call are not read again."""
        changed = {
            name: tensor
            for name, tensor in buffers.items()
            if tensor.is_inference() or self._checksums.get(name, (None, 0))[0] != _version(tensor)
        }
        bytes_by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in changed.values():
            bytes_by_device.setdefault(tensor.device, []).append(_bytes(tensor))
        on_host = {  # one transfer from each device, however many small buffers it has
            device: iter(torch.cat(parts).cpu().split([len(part) for part in parts]))
            for device, parts in bytes_by_device.items()
        }
        for name, tensor in changed.items():
            header = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
            content = next(on_host[tensor.device])
            version = None if tensor.is_inference() else _version(tensor)
            self._checksums[name] = version, zlib.crc32(memory(content), zlib.crc32(header))
        checksums = [self._checksums[name][1] for name in sorted(buffers)]
        return _bits(zlib.crc32(repr(checksums).encode()), sum(checksums))

    @torch.no_grad()
    def fill_own(self, buffers: Mapping[str, Tensor], shard: ShardReader, prefix: str) -> None:
        for name, tensor in buffers.items():
            stored = shard.header.chunks.get(prefix + name)
            dtype, shape = NAMES[tensor.dtype], tuple(tensor.shape)
            if stored is None or (stored.chunk.dtype, stored.chunk.shape) != (dtype, shape):
                before = "not saved" if stored is None else f"saved as {stored.chunk.dtype} {list(stored.chunk.shape)}"
                raise InvalidInput(f"{name} was {before} but is now {dtype} {list(shape)}: {INSTEAD}.")
            content = torch.empty(tensor.shape, dtype=tensor.dtype)
            shard.read_into([(stored.begin, memory(content))])
            tensor.copy_(content)

    def index(self, arrays: Mapping[str, Any], buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> StateIndex:
        return StateIndex(arrays, own, self._world.rank, self._world.size, self._several, buffers=buffers)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _bits(first: int, second: int) -> int:
    return ((second << 32) ^ first) % (1 << DIGEST_BITS)


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor in float64.

    The sum is computed in pieces, because torch copies a tensor to sum it in another dtype.
    """
    return torch.stack([piece.double().sum() for piece in tensor.reshape(-1).split(PIECE)]).sum()


def _tensor(array: Any) -> Tensor:
    """Return a tensor or a Buffer as a tensor with the same memory."""
    if isinstance(array, Buffer):
        dtype = DTYPES[array.dtype]
        empty = not len(array.memory)
        flat = torch.empty(0, dtype=dtype) if empty else torch.frombuffer(array.memory, dtype=dtype)
        return flat.reshape(array.shape)
    assert isinstance(array, Tensor)
    return array


def _device() -> torch.device:
    """Return the device for the tensors of collectives."""
    backend = dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
