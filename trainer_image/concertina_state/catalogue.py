"""The tensors of a state as one rank has them: which box of which global tensor each is, what of it this rank saves,
and how all of it is filled again from any world's shards. With torch.

What several ranks hold alike (DDP's weights, a replicated dimension of a mesh) is saved once: each of them saves a
part. Filling goes the same way: each rank reads the part that it would save, and gets the others' from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Shard, _StridedShard

from concertina_state.errors import BadInput
from concertina_state.format.read_plan import Box, ReadPlan, reads
from concertina_state.format.shardfile import Chunk, Header, Layout, layout_digest
from concertina_state.placement import Cut, box, rows
from concertina_state.tensors import NAMES, ShardReader, execute

BUCKET = 64 << 20
"""Bytes that are broadcast at a time."""


@dataclasses.dataclass(frozen=True)
class Copies:
    """Ranks that hold the same boxes."""

    ranks: tuple[int, ...]
    """In the order in which parts are given to them."""
    mine: int
    """Place of this rank among them."""
    group: dist.ProcessGroup | None = None
    """Of exactly these; None: the world, or nobody to talk to."""


ALONE = Copies((0,), 0)


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor of which this rank has a box."""

    name: str
    whole: tuple[int, ...]
    box: Box
    local: Tensor
    """Live, of the box's shape."""
    copies: Copies
    cut: str
    """How it is cut, the same on all ranks."""

    def part(self, begin: int, end: int) -> tuple[Chunk, Tensor]:
        """Some of its rows."""
        dtype = NAMES[self.local.dtype]
        if not self.whole:
            return Chunk(self.name, dtype, (), (), ()), self.local
        offsets = (self.box.offsets[0] + begin, *self.box.offsets[1:])
        shape = (end - begin, *self.box.shape[1:])
        return Chunk(self.name, dtype, offsets, shape, self.whole), self.local[begin:end]


class Catalogue:
    def __init__(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], rank: int, world: int, together: bool = True
    ) -> None:
        """`tensors`: by names that all ranks know, each whole tensor the same on all ranks, or a DTensor. `own`: bytes
        that this rank alone has, by names of its own. `together`: ranks can talk to each other by torch.distributed;
        else each saves, and reads, all that it has. Raises BadInput for what can't be saved."""
        everyone = Copies(tuple(range(world)), rank) if together else ALONE
        self.held = [_held(name, tensor, everyone) for name, tensor in sorted(tensors.items())]
        self._parts: dict[str, tuple[Chunk, Tensor]] = {}
        """Of those, what this rank saves."""
        for copies, alike in self._by_copies().items():
            self._parts |= {chunk.name: (chunk, tensor) for chunk, tensor in _parts(alike, copies, copies.mine)}
        alone = {name: (Chunk(name, NAMES[t.dtype], (0,), (len(t),), (len(t),)), t) for name, t in own.items()}
        saved = {**self._parts, **alone}
        self.layout = Layout([chunk for chunk, _ in saved.values()])
        self.tensors = [saved[chunk.name][1] for chunk in self.layout.chunks]
        """In the layout's order."""
        wholes = [(each.name, NAMES[each.local.dtype], each.whole) for each in self.held]
        self.digest = layout_digest(wholes, f"{world}, {together}: {sorted({each.cut for each in self.held})}")

    def still(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are the very tensors that it was made of."""
        return len(tensors) == len(self.held) and all(
            (now := tensors.get(each.name)) is not None and _local(now).data_ptr() == each.local.data_ptr()
            for each in self.held
        )

    def plan(self, held: Mapping[int, Header], instead: str) -> ReadPlan:
        """What this rank reads, of a saved state of which these are the shards' headers. Raises BadInput where it is
        not a whole state of these tensors; `instead`: what to do then."""
        wanted = [chunk for chunk, _ in self._parts.values()]
        for header in held.values():
            for chunk in wanted:
                stored = header.chunks.get(chunk.name)
                if stored and (stored.chunk.global_shape, stored.chunk.dtype) != (chunk.global_shape, chunk.dtype):
                    raise BadInput(
                        f"{chunk.name} was saved as {stored.chunk.dtype} {list(stored.chunk.global_shape)} and is "
                        f"{chunk.dtype} {list(chunk.global_shape)} now: {instead}."
                    )
        plan = reads(held, wanted)
        plan.require("the saved state")
        return plan

    @torch.no_grad()
    def fill(self, plan: ReadPlan, shards: Mapping[int, ShardReader]) -> None:
        """All tensors, on all ranks at once."""
        execute(plan, shards, {name: tensor for name, (_, tensor) in self._parts.items()})
        for copies, alike in self._by_copies().items():
            if len(copies.ranks) > 1:
                _exchange(alike, copies)

    def _by_copies(self) -> dict[Copies, list[Held]]:
        found: dict[Copies, list[Held]] = {}
        for each in self.held:
            found.setdefault(each.copies, []).append(each)
        return found


def _parts(alike: Sequence[Held], copies: Copies, number: int) -> list[tuple[Chunk, Tensor]]:
    """What rank `number` of those that hold them alike saves of each."""
    boxes = [(each.box.shape, each.local.element_size()) for each in alike]
    shares = zip(alike, rows(boxes, len(copies.ranks), number), strict=True)
    return [each.part(begin, end) for each, (begin, end) in shares if end > begin]


def _exchange(alike: Sequence[Held], copies: Copies) -> None:
    """Each rank's part to the others."""
    group = copies.group or dist.group.WORLD
    assert group is not None
    for number, source in enumerate(copies.ranks):
        for bucket in _buckets([tensor for _, tensor in _parts(alike, copies, number)]):
            dense = [part.contiguous() for part in bucket]
            root = dist.get_group_rank(group, source)
            dist._broadcast_coalesced(group, dense, BUCKET, root)  # type: ignore[attr-defined]
            for part, filled in zip(bucket, dense, strict=True):
                if part is not filled:
                    part.copy_(filled)


def _buckets(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """By dtype and device, as they can be sent together."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for part in parts:
        found.setdefault((part.dtype, part.device), []).append(part)
    return list(found.values())


def _held(name: str, tensor: Tensor, everyone: Copies) -> Held:
    if tensor.dtype not in NAMES:
        known = ", ".join(NAMES.values())
        raise BadInput(f"{name} has the dtype {tensor.dtype}, which can't be saved: convert it to one of {known}.")
    whole = tuple(tensor.shape)
    if isinstance(tensor, ShardedTensor):  # FSDP1's
        found = tensor.local_shards()
        offsets, sizes = (found[0].metadata.shard_offsets, found[0].metadata.shard_sizes) if found else ((), ())
        mine = Box(tuple(offsets), tuple(sizes)) if found else Box((0,) * len(whole), (0,) * len(whole))
        return Held(name, whole, mine, _local(tensor), ALONE, f"shards of {dist.get_world_size()}")
    if not isinstance(tensor, DTensor):
        return Held(name, whole, Box((0,) * len(whole), whole), tensor.detach(), everyone, "whole")
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise BadInput(f"{name} is a DTensor with a partial sum: reduce it before it is saved.")
    cuts = [
        Cut(placement.dim, late=isinstance(placement, _StridedShard))
        if isinstance(placement, (Shard, _StridedShard))
        else Cut(None)
        for placement in placements
    ]
    shape, coordinate = tuple(mesh.shape), mesh.get_coordinate()
    if coordinate is None:  # a mesh of other ranks
        nothing = Box((0,) * len(whole), (0,) * len(whole))
        return Held(name, whole, nothing, _local(tensor), ALONE, f"{shape} {placements}")
    copied = [axis for axis, cut in enumerate(cuts) if cut.dim is None and shape[axis] > 1]
    copies = ALONE
    if len(copied) == 1:  # of more dimensions each rank saves all that it has: right, and more than is needed
        group = mesh.get_group(copied[0])
        copies = Copies(tuple(dist.get_process_group_ranks(group)), coordinate[copied[0]], group)
    return Held(name, whole, box(whole, shape, coordinate, cuts), _local(tensor), copies, f"{shape} {placements}")


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return shards[0].tensor.detach() if shards else torch.empty((0,) * tensor.dim(), dtype=tensor.dtype)
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()
