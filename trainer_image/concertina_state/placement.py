"""Which box of a global tensor each rank holds, and which part of it the rank saves where others hold the same. Pure.

The box of a cut tensor is computed from its mesh and placements alone, as torch.distributed.checkpoint's own names the
wrong one where a dimension is cut twice and not evenly (decision "Boxes are computed")."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from concertina_state.format.read_plan import Box


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one dimension of a mesh treats a tensor: it cuts `dim`, or holds copies (None)."""

    dim: int | None
    late: bool = False
    """A strided shard (FSDP over a dimension that tensor parallelism cut before): cut after all others."""


def box(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut]) -> Box:
    """Of the rank at this coordinate; empty where nothing is left for it."""
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
    """Of boxes (shape, bytes an element) that `parts` ranks hold alike: the rows [begin, end) of each that rank `part`
    of them saves. They are laid end to end and that line is cut evenly, so a rank has a part of few of them, and each
    row is saved once. A single number counts as one row."""
    lengths = [shape[0] if shape else 1 for shape, _ in boxes]
    widths = [math.prod(shape[1:]) * size for shape, size in boxes]
    total = sum(length * width for length, width in zip(lengths, widths, strict=True))
    low, high = total * part // parts, total * (part + 1) // parts
    found, at = [], 0
    for length, width in zip(lengths, widths, strict=True):
        # A row belongs to whoever has its first byte.
        begin, end = (min(length, max(0, -(-(edge - at) // width))) if width else 0 for edge in (low, high))
        found.append((begin, end))
        at += length * width
    return found
