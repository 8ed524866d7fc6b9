"""Boxes of a tensor that a rank holds, and which of the ranks with the same box saves which part of it."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from concertina_state.placement import Cut, box, rows

SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.sampled_from([1, 2, 4, 8])), max_size=12), st.integers(1, 7))
def test_each_row_is_saved_once_and_parts_are_even(boxes, parts):
    saved = [rows(boxes, parts, part) for part in range(parts)]
    for index, (shape, _) in enumerate(boxes):
        covered = [row for part in saved for row in range(*part[index])]
        everything = range((shape[0] if shape else 1) if math.prod(shape) else 0)
        assert covered == list(everything)
    widths = [math.prod(shape[1:]) * size for shape, size in boxes]
    sizes = [sum((end - begin) * width for (begin, end), width in zip(part, widths, strict=True)) for part in saved]
    assert max(sizes) - min(sizes) <= 2 * max(widths, default=0)


def test_a_rank_has_a_part_of_few_tensors():
    """With a thousand tensors on a hundred ranks, the header of each rank names about ten tensors."""
    boxes = [((64, 32), 4)] * 1000
    named = [sum(end > begin for begin, end in rows(boxes, 100, part)) for part in range(100)]
    assert max(named) <= 12


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_boxes_of_a_dimension_that_is_cut_twice_are_those_that_hold_the_values(length, data, tensor, late):
    """The reference is a real tensor, cut by tensor parallelism first if FSDP's shard is strided."""
    whole = torch.arange(length)
    cuts = [Cut(0, late=late), Cut(0)]
    for coordinate in itertools.product(range(data), range(tensor)):
        order = [(data, coordinate[0]), (tensor, coordinate[1])]
        if late:
            order.reverse()
        held = whole
        for parts, place in order:
            step = -(-len(held) // parts)
            held = held[min(step * place, len(held)) : min(step * (place + 1), len(held))]
        actual_box = box((length,), (data, tensor), coordinate, cuts)
        assert actual_box.shape == (len(held),)
        if len(held):
            assert whole[actual_box.offsets[0] : actual_box.offsets[0] + actual_box.shape[0]].tolist() == held.tolist()


def test_a_dimension_that_holds_copies_is_not_cut():
    assert box((6, 4), (2, 3), (1, 2), [Cut(None), Cut(0)]) == box((6, 4), (3,), (2,), [Cut(0)])
