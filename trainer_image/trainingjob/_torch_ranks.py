"""How the processes of a world agree on what is saved, by torch.distributed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from concertina_state.buffers import Buffer
from concertina_state.catalogue import Catalogue, live
from concertina_state.errors import BadInput
from concertina_state.filling import ShardReader
from concertina_state.holdings import ArrayShard
from concertina_state.tensors import DTYPES, NAMES, memory
from trainingjob import World
from trainingjob._ranks import DIGEST_BITS, all_alike, halves
from trainingjob._refusals import INSTEAD

PIECE = 1 << 24
"""Numbers that are added up at a time."""


class TorchRanks:
    with_torch = True

    def __init__(self, world: World) -> None:
        self._world = world
        self._together = world.size > 1
        self._checksums: dict[str, tuple[tuple[int, int] | None, int]] = {}
        """Of buffers, by name, with the version of which each is."""
        if self._together and not dist.is_initialized():
            raise BadInput(
                f"{world.size} processes keep one state, and can't agree yet: call "
                "torch.distributed.init_process_group() before State is made, or give State(gather=...)."
            )

    def sums(self, numbers: Sequence[float]) -> list[float]:
        if not self._together:
            return list(numbers)
        payload = torch.tensor(numbers, dtype=torch.float64, device=_device())
        dist.all_reduce(payload)
        found: list[float] = payload.tolist()
        return found

    def same(self, value: Any) -> Any:
        if not self._together:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=_device())
        return box[0]

    def array(self, array: Any, name: str) -> Tensor | ArrayShard:
        tensor = _tensor(array.array if isinstance(array, ArrayShard) else array)
        if live(tensor).is_meta:
            raise BadInput(f"{name} is on the meta device, so it has no content to save: materialize it (to_empty).")
        return ArrayShard(tensor, array.offsets, array.shape) if isinstance(array, ArrayShard) else tensor

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        """By their sums, so that nothing leaves the device but these."""
        if not self._together:
            return []
        names = halves(_bits(zlib.crc32(repr(sorted(arrays)).encode()), len(arrays)))
        low, low2, high, high2 = self.sums(names)
        if not (all_alike(self._world.size, low, low2) and all_alike(self._world.size, high, high2)):
            raise BadInput("the ranks keep arrays of other names: give State the same objects on all ranks.")
        if not arrays:
            return []
        least = torch.stack([_sum(each).to(_device()) for each in arrays.values()])
        most = -least
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MIN)
        bounds = zip(arrays, least.tolist(), (-most).tolist(), strict=True)
        return [name for name, low, high in bounds if low != high and not (math.isnan(low) and math.isnan(high))]

    def memory(self, data: bytearray) -> Tensor:
        return torch.frombuffer(data, dtype=torch.uint8)

    @torch.no_grad()
    def digest(self, buffers: Mapping[str, Tensor]) -> int:
        """What has not changed since the last call is not read again: masks and tables never do."""
        changed = {
            name: tensor
            for name, tensor in buffers.items()
            if tensor.is_inference() or self._checksums.get(name, (None, 0))[0] != _version(tensor)
        }
        on_devices: dict[torch.device, list[Tensor]] = {}
        for tensor in changed.values():
            on_devices.setdefault(tensor.device, []).append(_bytes(tensor))
        brought = {  # one transfer from each device, however many small buffers it has
            device: iter(torch.cat(parts).cpu().split([len(part) for part in parts]))
            for device, parts in on_devices.items()
        }
        for name, tensor in changed.items():
            about = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
            content = next(brought[tensor.device])
            version = None if tensor.is_inference() else _version(tensor)
            self._checksums[name] = version, zlib.crc32(memory(content), zlib.crc32(about))
        checksums = [self._checksums[name][1] for name in sorted(buffers)]
        return _bits(zlib.crc32(repr(checksums).encode()), sum(checksums))

    @torch.no_grad()
    def fill_own(self, buffers: Mapping[str, Tensor], shard: ShardReader, prefix: str) -> None:
        for name, tensor in buffers.items():
            stored = shard.header.chunks.get(prefix + name)
            now = (NAMES[tensor.dtype], tuple(tensor.shape))
            if stored is None or (stored.chunk.dtype, stored.chunk.shape) != now:
                what = "not saved" if stored is None else f"saved as {stored.chunk.dtype} {list(stored.chunk.shape)}"
                raise BadInput(f"{name} was {what} and is {now[0]} {list(now[1])} now: {INSTEAD}.")
            content = torch.empty(tensor.shape, dtype=tensor.dtype)
            shard.read_into([(stored.begin, memory(content))])
            tensor.copy_(content)

    def catalogue(
        self, arrays: Mapping[str, Any], buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]
    ) -> Catalogue:
        return Catalogue(arrays, own, self._world.rank, self._world.size, self._together, buffers=buffers)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _bits(first: int, second: int) -> int:
    return ((second << 32) ^ first) % (1 << DIGEST_BITS)


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum in float64. In pieces: torch copies what it adds up in another dtype."""
    return torch.stack([piece.double().sum() for piece in tensor.reshape(-1).split(PIECE)]).sum()


def _tensor(array: Any) -> Tensor:
    """The same memory."""
    if isinstance(array, Buffer):
        dtype = DTYPES[array.dtype]
        empty = not len(array.memory)
        flat = torch.empty(0, dtype=dtype) if empty else torch.frombuffer(array.memory, dtype=dtype)
        return flat.reshape(array.shape)
    assert isinstance(array, Tensor)
    return array


def _device() -> torch.device:
    """On which collectives take numbers."""
    backend = dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
