"""Frozen weights that are read from the files with which a run began, and are not saved with the state.

Training does not change frozen weights. The state therefore only names the files and a digest of the values. A worker
process that stays for the next round keeps its frozen weights, and reads only missing weights again. The process does
not keep the original values of quantized weights.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from concertina_state.errors import InvalidInput
from concertina_state.filling import ShardReader
from concertina_state.format.read_plan import Box, reads
from concertina_state.format.shardfile import Chunk, FrozenWeights
from concertina_state.state_index import StateIndex
from concertina_trainer.parallel.group import DistContext


@dataclasses.dataclass
class _Kept:
    """Frozen weights that this process keeps from one round to the next.

    A round is a period in which a fixed set of replicas trains.
    """

    source: FrozenWeights
    local: dict[str, tuple[Box, Tensor]]
    """This rank's box of each weight, keyed by the weight's name."""


_kept: _Kept | None = None
MOST_DIMENSIONS = 3
"""Maximum number of dimensions of a weight."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for the bits of a floating-point dtype, keyed by the size of the dtype in bytes."""


@torch.no_grad()
def load(
    index: StateIndex, source: FrozenWeights, files: Callable[[], Sequence[ShardReader]], world: DistContext
) -> None:
    """Fill the frozen weights of all ranks, and check their digest.

    `files` is a function that opens the files of weights. It is called only if this process lacks some of its frozen
    weights.

    Raises:
        InvalidInput: When values in the files differ from those with which the run began, or the files lack some
            weights.
        StorageError: When storage can't be read.
    """
    kept = _kept.local if _kept and _kept.source == source else {}
    missing: list[Chunk] = []
    for name, (chunk, tensor) in index.wanted().items():
        box, (earlier, values) = Box.of(chunk), kept.get(name, (None, None))
        if earlier is not None and values is not None and earlier.common(box) == box:
            tensor.copy_(values[box.within(earlier)])
        else:
            missing.append(chunk)
    shards = files() if missing else ()
    plan = reads({number: shard.header for number, shard in enumerate(shards)}, missing)
    plan.require(source.uri)
    index.fill(plan, dict(enumerate(shards)))
    _check(source, digest(index, world))
    _keep(index, source)


def begun_with(index: StateIndex, source: FrozenWeights, world: DistContext) -> FrozenWeights:
    """Check the digest of the frozen weights that a new run has just read, and return `source` with this digest.

    Raises:
        InvalidInput: When `source` already has a digest that differs from the digest of the weights.
    """
    seen = digest(index, world)
    if source.digest:
        _check(source, seen)
    source = dataclasses.replace(source, digest=seen)
    _keep(index, source)
    return source


def _check(source: FrozenWeights, seen: str) -> None:
    if seen != source.digest:
        raise InvalidInput(
            f"the frozen weights in {source.uri} have digest {seen}, and the adapters were trained with weights of "
            f"digest {source.digest}: put the files back as they were."
        )


def _keep(index: StateIndex, source: FrozenWeights) -> None:
    """Keep this rank's frozen weights in memory for the next round of this process."""
    global _kept
    local = {array.name: (array.box, array.local) for array in index.held if array.local.numel()}
    _kept = _Kept(source, local)


def forget(names: Collection[str]) -> None:
    """Free the memory of frozen weights that this process has kept for its next round."""
    if _kept:
        for name in names:
            _kept.local.pop(name, None)


def digest(index: StateIndex, world: DistContext) -> str:
    """Return a digest of the values of all frozen weights, the same in every layout.

    Each rank computes checksums of the parts that it would save. The checksum of a weight is the sum of the checksums
    of its parts. If several ranks have the same part, the part counts once.
    """
    names = [array.name for array in index.held]
    rows = torch.zeros(len(names), 2 + MOST_DIMENSIONS, dtype=torch.int64)
    parts = index.wanted()
    for row, name in zip(rows, names, strict=True):
        if name in parts and parts[name][1].numel():
            chunk, tensor = parts[name]
            place = hashlib.sha256(json.dumps([chunk.offsets, chunk.shape]).encode()).digest()
            row[0] = int.from_bytes(place[:8], "big", signed=True)
            sums = _checksums(tensor, chunk.offsets)
            row[1 : 1 + len(sums)] = sums
    gathered = [torch.empty_like(rows, device=world.device) for _ in range(world.size)]
    dist.all_gather(gathered, rows.to(world.device))
    by_name = torch.stack(gathered).cpu().unbind(1)
    whole = {}
    for name, of_ranks in zip(names, by_name, strict=True):
        distinct = {tuple(row) for row in of_ranks.tolist()}
        whole[name] = [sum(values) % 2**64 for values in zip(*(row[1:] for row in distinct), strict=True)]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


def _checksums(tensor: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return checksums modulo 2**64 of this rank's part of a weight, as an int64 tensor `[1 + dimensions]`.

    The part begins at the indices `offsets` of the whole weight. The first checksum is the sum of the elements' bits.
    There is one more checksum for each dimension: the sum of the elements' bits, each multiplied by the element's index
    in that dimension of the whole weight. A change of the order therefore changes a checksum.
    """
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    sums = [bits.sum(dtype=torch.int64)]
    for dimension, begin in enumerate(offsets):
        others = [other for other in range(bits.dim()) if other != dimension]
        along = bits.sum(others, dtype=torch.int64) if others else bits.long()
        sums.append((along * torch.arange(begin, begin + len(along), device=bits.device)).sum())
    return torch.stack(sums).cpu()
