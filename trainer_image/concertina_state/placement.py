"""Boxes (rectangular parts) of a global tensor: the box that each rank has, and the rows of the box that it saves.

If several ranks have the same box, each of them saves some of its rows. All functions are pure.

The box of a rank is computed only from the tensor's mesh and placements. torch.distributed.checkpoint can't be used,
because it computes a wrong box if a dimension is divided twice and unevenly (decision "Tensor boxes follow from mesh
and placements").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from concertina_state.format.read_plan import Box


@dataclasses.dataclass(frozen=True)
class Cut:
    """Effect of one mesh dimension on a tensor.

    The mesh dimension divides the tensor's dimension `dim`. If `dim` is None, the mesh dimension replicates the tensor.
    """

    dim: int | None
    late: bool = False
    """True if this is a strided shard, which divides the tensor after all other mesh dimensions.

    FSDP makes a strided shard of a dimension that tensor parallelism has already divided.
    """


def box(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut]) -> Box:
    """Return the box of a tensor that the rank at a coordinate of the mesh has.

    A box is a rectangular part of the tensor. The box is empty if no elements remain for this rank.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    order = [axis for axis, cut in enumerate(cuts) if cut.dim is not None]
    for axis in sorted(order, key=lambda axis: cuts[axis].late):
        dim = cuts[axis].dim
        assert dim is not None
        length = -(-sizes[dim] // mesh[axis])
        begin = min(length * coordinate[axis], sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(begin + length, sizes[dim]) - begin
    return Box(tuple(offsets), tuple(sizes))


def rows(boxes: Sequence[tuple[tuple[int, ...], int]], parts: int, part: int) -> list[tuple[int, int]]:
    """Return the rows of each box that one of several ranks saves, as half-open ranges [first row, row after the last).

    A box is the part of a tensor that a rank has. All `parts` ranks have the same boxes, and this rank has the index
    `part` among them. `boxes` contains the shape of each box and the size of an element in bytes.

    The boxes are laid end to end and divided into `parts` pieces of about equal size. Each rank therefore saves parts
    of few boxes, and each row is saved once. A scalar counts as one row.
    """
    lengths = [shape[0] if shape else 1 for shape, _ in boxes]
    widths = [math.prod(shape[1:]) * size for shape, size in boxes]
    total = sum(length * width for length, width in zip(lengths, widths))
    low, high = total * part // parts, total * (part + 1) // parts
    ranges, offset = [], 0
    for length, width in zip(lengths, widths):
        # A row belongs to the rank whose piece contains the first byte of the row.
        begin, end = (min(length, max(0, -(-(edge - offset) // width))) if width else 0 for edge in (low, high))
        ranges.append((begin, end))
        offset += length * width
    return ranges
