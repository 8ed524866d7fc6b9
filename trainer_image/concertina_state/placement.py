"""Which box of a global tensor each rank holds, and which part of it the rank saves if others hold the same. Pure.

The box of a cut tensor is computed from its mesh and placements alone. The box that torch.distributed.checkpoint names
is wrong if a dimension is cut twice and not evenly (decision "Boxes are computed").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from concertina_state.format.read_plan import Box


@dataclasses.dataclass(frozen=True)
class Cut:
    """Treatment of a tensor by one dimension of a mesh: it cuts `dim`, or holds copies (None)."""

    dim: int | None
    late: bool = False
    """Whether this is a strided shard, which is cut after all others.

    FSDP makes these over a dimension that tensor parallelism cut before.
    """


def box(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut]) -> Box:
    """Return the box of the rank at this coordinate of the mesh; empty if nothing remains for it."""
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
    """Return the rows [begin, end) of each box that rank `part` of `parts` ranks saves.

    The ranks hold the same boxes, each given as its shape and the bytes of an element. The boxes are laid end to end,
    and that line is cut evenly. So each rank has parts of few boxes, and each row is saved once. A single number counts
    as one row.
    """
    lengths = [shape[0] if shape else 1 for shape, _ in boxes]
    widths = [math.prod(shape[1:]) * size for shape, size in boxes]
    total = sum(length * width for length, width in zip(lengths, widths))
    low, high = total * part // parts, total * (part + 1) // parts
    ranges, offset = [], 0
    for length, width in zip(lengths, widths):
        # A row belongs to the rank that has its first byte.
        begin, end = (min(length, max(0, -(-(edge - offset) // width))) if width else 0 for edge in (low, high))
        ranges.append((begin, end))
        offset += length * width
    return ranges
