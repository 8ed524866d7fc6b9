"""Sequences from documents, by their lengths alone: every predictable token is predicted once, within its document."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina_trainer.data.sequence_plan import PLANNERS, packed

sizes = st.lists(st.integers(1, 80), min_size=1, max_size=40)


def starts(sizes):
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)


@pytest.mark.parametrize("documents", PLANNERS)
@settings(deadline=None)
@given(sizes=sizes, length=st.integers(2, 50))
def test_every_token_but_a_document_s_first_is_predicted_once(documents, sizes, length):
    total = sum(sizes)
    plan = PLANNERS[documents](starts(sizes), total, length)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    predicted = np.zeros(total, dtype=int)
    for sequence in range(len(plan)):
        segments = range(plan.first[sequence], plan.first[sequence + 1])
        assert sum(plan.lengths[s] for s in segments) <= length + 1
        for s in segments:
            begin, end = plan.begins[s], plan.begins[s] + plan.lengths[s]
            assert len(set(owner[begin:end])) == 1
            predicted[begin + 1 : end] += 1
    expected = np.ones(total, dtype=int)
    expected[starts(sizes)] = 0
    if documents == "Masked":
        expected[max(0, (total - 1) // length) * length + 1 :] = 0
    assert (predicted == expected).all()
    assert plan.predicted.sum() == expected.sum()


def test_packing_fills():
    generator = np.random.default_rng(0)
    sizes = np.maximum(2, generator.lognormal(6.5, 1.0, 5000).astype(np.int64))
    plan = packed(starts(sizes), int(sizes.sum()), 2048)
    assert plan.lengths.sum() / (len(plan) * 2049) > 0.999


def test_the_packing_never_changes():
    """Positions count packed sequences, so this hash may never change."""
    sizes = (np.arange(3000) * 7919) % 613 + 1
    plan = packed(starts(sizes), int(sizes.sum()), 128)
    content = [array.astype("<i8").tobytes() for array in (plan.first, plan.begins, plan.lengths)]
    assert (
        hashlib.sha256(b"".join(content)).hexdigest()
        == "32e1d1036206c42dacc7d16460300cab9c11dded0d1cef6e4bbd69a63b941e0b"
    )
