"""The tensors of a state as one rank has them: which box of which global tensor each is, and how all of it is filled
again from any world's shards. With torch.

Filling goes the way of saving: of what several ranks hold alike each reads the part that it would save, and gets the
others' from them."""

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
"""Bytes that are broadcast at a time."""


class StateIndex(LocalState[Tensor]):
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
        """`tensors`: by names that all ranks know, each a whole tensor that is the same on all ranks, a DTensor, or an
        ArrayShard. `whole_cut`: see LocalState.
        `own`: what this rank alone has, by names of its own. `together`: ranks can talk to each other by
        torch.distributed; else each saves, and reads, all that it has. `buffers`: tensors that are the same on all
        ranks, and of which rank 0 saves each whole. Raises InvalidInput for what can't be saved."""
        ranks = tuple(range(world))
        everyone = Copies(ranks, rank) if together else ALONE
        once = Copies(ranks, rank, saved_whole=True) if together else ALONE
        given = {**dict.fromkeys(tensors, everyone), **dict.fromkeys(buffers, once)}
        of_all = {**tensors, **buffers}
        held = [_held(name, of_all[name], given[name]) for name in sorted(of_all)]
        alone = [(_own(name, tensor), tensor.detach()) for name, tensor in sorted(own.items())]
        super().__init__(held, alone, f"{world}, {together}", whole_cut)
        self.saved = Tensors(self.layout, self._saved)
        places = [(each.name, each.local) for each in self.held] + [(chunk.name, tensor) for chunk, tensor in alone]
        self._addresses = {name: tensor.data_ptr() for name, tensor in places}

    def still(self, tensors: Mapping[str, Tensor | ArrayShard]) -> bool:
        """Whether these are the very tensors that it was made of: arrays, buffers and what this rank alone has."""
        return tensors.keys() == self._addresses.keys() and all(
            live(tensor).data_ptr() == self._addresses[name] for name, tensor in tensors.items()
        )

    @torch.no_grad()
    def fill(self, plan: ReadPlan, shards: Mapping[int, ShardReader]) -> None:
        """All tensors, on all ranks at once."""
        execute(plan, shards, {name: tensor for name, (_, tensor) in self._parts.items()})
        for copies, alike in self._by_copies().items():
            if len(copies.ranks) > 1:
                _exchange(alike, copies)


def _exchange(alike: Sequence[LocalArray[Tensor]], copies: Copies) -> None:
    """Each rank's part to the others."""
    group = copies.group or dist.group.WORLD
    assert group is not None
    for number, source in enumerate(copies.ranks):
        for device, bucket in _buckets([tensor for _, tensor in parts(alike, copies, number)], group):
            dense = [part.to(device).contiguous() for part in bucket]
            root = dist.get_group_rank(group, source)
            # As bytes: backends have no word for some dtypes.
            bytes_ = [each.reshape(-1).view(torch.uint8) for each in dense]
            dist._broadcast_coalesced(group, bytes_, BUCKET, root)
            for part, filled in zip(bucket, dense, strict=True):
                if part is not filled:
                    part.copy_(filled)


def _buckets(parts: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[tuple[torch.device, list[Tensor]]]:
    """Those that can be sent together, and from which device: NCCL does not send from the host's memory, and takes it
    by the device in pieces, as there may be no room for all."""
    found: dict[torch.device, list[Tensor]] = {}
    for part in parts:
        found.setdefault(part.device, []).append(part)
    devices = group._device_types
    for device, alike in found.items():
        if not devices or device.type in {each.type for each in devices}:
            yield device, alike
            continue
        ends = itertools.accumulate(part.nbytes for part in alike)
        for _, piece in itertools.groupby(zip(ends, alike, strict=True), lambda each: each[0] // BUCKET):
            yield devices[0], [part for _, part in piece]


def _held(name: str, given: Tensor | ArrayShard | RemoteArray, everyone: Copies) -> LocalArray[Tensor]:
    if isinstance(given, RemoteArray):
        zeros = (0,) * len(given.shape)
        return LocalArray(
            name, tuple(given.shape), Box(zeros, zeros), NAMES[given.dtype], torch.empty(zeros, dtype=given.dtype),
            ALONE, "elsewhere",
        )  # fmt: skip
    tensor: Tensor = given.array if isinstance(given, ArrayShard) else given
    check_kind(name, tensor)
    dtype, whole = NAMES[tensor.dtype], tuple(tensor.shape)
    if isinstance(given, ArrayShard):
        return held_part(name, given, tensor.detach(), whole, dtype)
    if isinstance(tensor, ShardedTensor):  # FSDP1's
        found = tensor.local_shards()
        offsets, sizes = (found[0].metadata.shard_offsets, found[0].metadata.shard_sizes) if found else ((), ())
        mine = Box(tuple(offsets), tuple(sizes)) if found else Box((0,) * len(whole), (0,) * len(whole))
        return LocalArray(name, whole, mine, dtype, _local(tensor), ALONE, f"shards of {dist.get_world_size()}")
    if not isinstance(tensor, DTensor):
        return LocalArray(name, whole, Box((0,) * len(whole), whole), dtype, tensor.detach(), everyone, "whole")
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise InvalidInput(f"{name} is a DTensor with a partial sum: reduce it before it is saved.")
    cuts = [
        Cut(placement.dim, late=isinstance(placement, _StridedShard))
        if isinstance(placement, (Shard, _StridedShard))
        else Cut(None)
        for placement in placements
    ]
    shape, coordinate = tuple(mesh.shape), mesh.get_coordinate()
    if coordinate is None:  # a mesh of other ranks
        nothing = Box((0,) * len(whole), (0,) * len(whole))
        return LocalArray(name, whole, nothing, dtype, _local(tensor), ALONE, f"{shape} {placements}")
    copied = [axis for axis, cut in enumerate(cuts) if cut.dim is None and shape[axis] > 1]
    copies = ALONE
    if len(copied) == 1:  # of more dimensions each rank saves all that it has: right, and more than is needed
        group = mesh.get_group(copied[0])
        copies = Copies(tuple(dist.get_process_group_ranks(group)), coordinate[copied[0]], group)
    mine = box(whole, shape, coordinate, cuts)
    return LocalArray(name, whole, mine, dtype, _local(tensor), copies, f"{shape} {placements}")


def _own(name: str, tensor: Tensor) -> Chunk:
    check_kind(name, tensor)
    return own_chunk(name, NAMES[tensor.dtype], tensor.shape)


def check_kind(name: str, tensor: Tensor) -> None:
    """Raise InvalidInput for a tensor that has no plain memory to save."""
    if tensor.dtype not in NAMES:
        known = ", ".join(NAMES.values())
        raise InvalidInput(f"{name} has the dtype {tensor.dtype}, which can't be saved: convert it to one of {known}.")
    if isinstance(tensor, ShardedTensor):
        return
    if tensor.layout != torch.strided or tensor.is_nested:
        raise InvalidInput(f"{name} is a tensor with the layout {tensor.layout}, which can't be saved: make it dense.")
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in (Tensor, torch.nn.Parameter) and (
        is_traceable_wrapper_subclass(local) or (local.numel() and not _has_memory(local))
    ):
        kind, cut = type(local), " that a DTensor has cut" if isinstance(tensor, DTensor) else ""
        raise InvalidInput(
            f"{name} is a {kind.__module__}.{kind.__qualname__}{cut}, which can't be saved: it has no memory of its "
            "own that can be taken as it is."
        )


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # torch's word for a wrapper without a storage
        return False


def live(given: Tensor | ArrayShard) -> Tensor:
    """What this rank has of it, itself: of a thousand tensors a view of each takes longer than to ask where it lies."""
    tensor: Tensor = given.array if isinstance(given, ArrayShard) else given
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        found: Tensor = shards[0].tensor if shards else torch.empty((0,) * tensor.dim(), dtype=tensor.dtype)
        return found
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return live(tensor).detach()
