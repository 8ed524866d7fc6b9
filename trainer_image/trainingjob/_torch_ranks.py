"""How the processes of a world agree on what is saved, by torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from concertina_state.buffers import Buffer
from concertina_state.catalogue import Catalogue
from concertina_state.errors import BadInput
from concertina_state.holdings import Part
from concertina_state.tensors import DTYPES
from trainingjob import World


class TorchRanks:
    with_torch = True

    def __init__(self, world: World) -> None:
        self._world = world
        self._together = world.size > 1
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

    def array(self, array: Any, name: str) -> Tensor | Part:
        return Part(_tensor(array.array), array.offsets, array.shape) if isinstance(array, Part) else _tensor(array)

    def differing(self, arrays: Mapping[str, Any]) -> list[str]:
        """By their sums, so that nothing leaves the device but these."""
        if not self._together or not arrays:
            return []
        least = torch.stack([each.double().sum().to(_device()) for each in arrays.values()])
        most = -least
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MIN)
        bounds = zip(arrays, least.tolist(), (-most).tolist(), strict=True)
        return [name for name, low, high in bounds if low != high and not (math.isnan(low) and math.isnan(high))]

    def catalogue(self, arrays: Mapping[str, Any], own: Mapping[str, bytearray]) -> Catalogue:
        bytes_ = {name: torch.frombuffer(each, dtype=torch.uint8) for name, each in own.items()}
        return Catalogue(arrays, bytes_, self._world.rank, self._world.size, self._together)


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
