"""Tensors of a state on one rank, each with its box (rectangular part) of the global tensor. Requires torch.

A state can be restored by any number of ranks. If several ranks have the same tensors, each rank reads the part that it
would save, and receives the other parts from the other ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Shard, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from concertina_state.errors import InvalidInput
from concertina_state.filling import ShardReader
from concertina_state.format.read_plan import Box, ReadPlan
from concertina_state.format.shardfile import Chunk
from concertina_state.holdings import (
    ALONE,
    ArrayShard,
    Copies,
    LocalArray,
    LocalState,
    RemoteArray,
    held_part,
    own_chunk,
    parts,
)
from concertina_state.placement import Cut, box
from concertina_state.tensors import NAMES, Tensors, execute

BUCKET = 64 << 20
"""Number of bytes to broadcast at a time."""


class StateIndex(LocalState[Tensor]):
    """Index of the tensors that one rank has of a state, keyed by name."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor | ArrayShard | RemoteArray],
        own: Mapping[str, Tensor],
        rank: int,
        world: int,
        together: bool = True,
        whole_cut: str = "",
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Record the tensors of this rank, and choose the parts that this rank saves.

        Args:
            tensors: Tensors, keyed by names that are the same on all ranks. A value is a whole tensor with the same
                content on all ranks, a DTensor, an ArrayShard, or a RemoteArray.
            own: Tensors that only this rank has, keyed by names that no other rank uses.
            rank: This rank.
            world: Number of ranks.
            together: Whether ranks can communicate by torch.distributed. If not, each rank saves and reads all its
                tensors.
            whole_cut: Description of how all ranks divide each tensor (see LocalState).
            buffers: Tensors that are the same on all ranks. Rank 0 saves each of them whole.

        Raises:
            InvalidInput: When a tensor can't be saved.
        """
        ranks = tuple(range(world))
        everyone = Copies(ranks, rank) if together else ALONE
        once = Copies(ranks, rank, saved_whole=True) if together else ALONE
        copies_by_name = {**dict.fromkeys(tensors, everyone), **dict.fromkeys(buffers, once)}
        of_all = {**tensors, **buffers}
        local_arrays = [_local_array(name, of_all[name], copies_by_name[name]) for name in sorted(of_all)]
        alone = [(_own(name, tensor), tensor.detach()) for name, tensor in sorted(own.items())]
        super().__init__(local_arrays, alone, f"{world}, {together}", whole_cut)
        self.saved = Tensors(self.layout, self._saved)
        places = [(local_array.name, local_array.local) for local_array in self.held] + [
            (chunk.name, tensor) for chunk, tensor in alone
        ]
        self._addresses = {name: tensor.data_ptr() for name, tensor in places}

    def still(self, tensors: Mapping[str, Tensor | ArrayShard]) -> bool:
        """Return whether `tensors` are the same tensor objects that this index was made from.

        If they are, the next snapshot can use this index again. `tensors` must include buffers and the tensors that
        only this rank has.
        """
        return tensors.keys() == self._addresses.keys() and all(
            live(tensor).data_ptr() == self._addresses[name] for name, tensor in tensors.items()
        )

    @torch.no_grad()
    def fill(self, plan: ReadPlan, shards: Mapping[int, ShardReader]) -> None:
        """Read all tensors of this rank from a saved state. All ranks must call this method at the same time."""
        execute(plan, shards, dict(self._parts.values()))
        for copies, same_tensors in self._by_copies().items():
            if len(copies.ranks) > 1:
                _exchange(same_tensors, copies)


def _exchange(same_tensors: Sequence[LocalArray[Tensor]], copies: Copies) -> None:
    """Exchange the read parts between ranks with the same tensors, so that each of these ranks has all parts."""
    group = copies.group or dist.group.WORLD
    assert group is not None
    for number, source in enumerate(copies.ranks):
        for device, bucket in _buckets([tensor for _, tensor in parts(same_tensors, copies, number)], group):
            dense = [part.to(device).contiguous() for part in bucket]
            root = dist.get_group_rank(group, source)
            # View tensors as bytes, because backends do not support some dtypes.
            bytes_ = [tensor.reshape(-1).view(torch.uint8) for tensor in dense]
            dist._broadcast_coalesced(group, bytes_, BUCKET, root)
            for part, filled in zip(bucket, dense):
                if part is not filled:
                    part.copy_(filled)


def _buckets(parts: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[tuple[torch.device, list[Tensor]]]:
    """Yield groups of tensors to send together, each with the device from which to send them.

    NCCL does not send from host memory. Tensors in host memory are therefore copied to the device in pieces, because
    the device may not have space for all.
    """
    parts_by_device: dict[torch.device, list[Tensor]] = {}
    for part in parts:
        parts_by_device.setdefault(part.device, []).append(part)
    devices = group._device_types
    for device, same_device in parts_by_device.items():
        if not devices or device.type in {group_device.type for group_device in devices}:
            yield device, same_device
            continue
        ends = itertools.accumulate(part.nbytes for part in same_device)
        for _, piece in itertools.groupby(zip(ends, same_device), lambda end_and_part: end_and_part[0] // BUCKET):
            yield devices[0], [part for _, part in piece]


def _local_array(name: str, array: Tensor | ArrayShard | RemoteArray, everyone: Copies) -> LocalArray[Tensor]:
    if isinstance(array, RemoteArray):
        zeros = (0,) * len(array.shape)
        return LocalArray(
            name, tuple(array.shape), Box(zeros, zeros), NAMES[array.dtype], torch.empty(zeros, dtype=array.dtype),
            ALONE, "elsewhere",
        )  # fmt: skip
    tensor: Tensor = array.array if isinstance(array, ArrayShard) else array
    check_kind(name, tensor)
    dtype, whole = NAMES[tensor.dtype], tuple(tensor.shape)
    if isinstance(array, ArrayShard):
        return held_part(name, array, tensor.detach(), whole, dtype)
    if isinstance(tensor, ShardedTensor):  # FSDP1's tensors
        shards = tensor.local_shards()
        offsets, sizes = (shards[0].metadata.shard_offsets, shards[0].metadata.shard_sizes) if shards else ((), ())
        own_box = Box(tuple(offsets), tuple(sizes)) if shards else Box((0,) * len(whole), (0,) * len(whole))
        return LocalArray(name, whole, own_box, dtype, _local(tensor), ALONE, f"shards of {dist.get_world_size()}")
    if not isinstance(tensor, DTensor):
        return LocalArray(name, whole, Box((0,) * len(whole), whole), dtype, tensor.detach(), everyone, "whole")
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise InvalidInput(f"{name} is a DTensor with a partial sum: reduce it before you save it.")
    cuts = [
        Cut(placement.dim, late=isinstance(placement, _StridedShard))
        if isinstance(placement, (Shard, _StridedShard))
        else Cut(None)
        for placement in placements
    ]
    shape, coordinate = tuple(mesh.shape), mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the tensor's mesh
        nothing = Box((0,) * len(whole), (0,) * len(whole))
        return LocalArray(name, whole, nothing, dtype, _local(tensor), ALONE, f"{shape} {placements}")
    copied = [axis for axis, cut in enumerate(cuts) if cut.dim is None and shape[axis] > 1]
    copies = ALONE
    if len(copied) == 1:  # otherwise each rank saves its whole box: correct, but several times
        group = mesh.get_group(copied[0])
        copies = Copies(tuple(dist.get_process_group_ranks(group)), coordinate[copied[0]], group)
    own_box = box(whole, shape, coordinate, cuts)
    return LocalArray(name, whole, own_box, dtype, _local(tensor), copies, f"{shape} {placements}")


def _own(name: str, tensor: Tensor) -> Chunk:
    check_kind(name, tensor)
    return own_chunk(name, NAMES[tensor.dtype], tensor.shape)


def check_kind(name: str, tensor: Tensor) -> None:
    """Check that a tensor's dtype and memory layout can be saved. Those of a sparse tensor, for example, can't be.

    Raises:
        InvalidInput: When the tensor can't be saved.
    """
    if tensor.dtype not in NAMES:
        names = ", ".join(NAMES.values())
        raise InvalidInput(f"{name} has the dtype {tensor.dtype}, which can't be saved: convert it to one of {names}.")
    if isinstance(tensor, ShardedTensor):
        return
    if tensor.layout != torch.strided or tensor.is_nested:
        raise InvalidInput(
            f"{name} is a tensor with the layout {tensor.layout}, which can't be saved: convert it to a dense tensor."
        )
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in (Tensor, torch.nn.Parameter) and (
        is_traceable_wrapper_subclass(local) or (local.numel() and not _has_memory(local))
    ):
        kind, cut = type(local), " in a DTensor" if isinstance(tensor, DTensor) else ""
        raise InvalidInput(
            f"{name} is a {kind.__module__}.{kind.__qualname__}{cut}, which can't be saved: its content is "
            "not in one block of its own memory."
        )


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # a wrapper tensor without storage raises this
        return False


def live(array: Tensor | ArrayShard) -> Tensor:
    """Return the local tensor of a tensor, DTensor or ArrayShard, without making a view of it.

    For a thousand tensors, making views takes longer than reading their addresses.
    """
    tensor: Tensor = array.array if isinstance(array, ArrayShard) else array
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        local: Tensor = shards[0].tensor if shards else torch.empty((0,) * tensor.dim(), dtype=tensor.dtype)
        return local
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return live(tensor).detach()
