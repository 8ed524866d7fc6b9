"""Rows of tokens: each class copies the same tokens, and the fastest usable class is chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from concertina_data import rows
from concertina_data.rows import NumpyRows, PlainRows, Rows, TorchRows

CLASSES = (PlainRows, TorchRows, NumpyRows)


@given(data=st.data(), token_bytes=st.sampled_from([1, 2, 4]), width=st.integers(1, 9))
def test_all_classes_copy_the_same_tokens(data: st.DataObject, token_bytes: int, width: int) -> None:
    tokens = data.draw(st.lists(st.integers(0, 2 ** (8 * token_bytes) - 1), min_size=width, max_size=40))
    begins = data.draw(st.lists(st.integers(0, len(tokens) - width), min_size=1, max_size=4))
    cut = data.draw(st.integers(0, width))
    content = b"".join(token.to_bytes(token_bytes, "little") for token in tokens)
    for kind in CLASSES:
        shared, filled = kind.tokens(content, token_bytes), kind(len(begins), width)
        for row, begin in enumerate(begins):
            for offset, end in ((0, cut), (cut, width)):
                filled.put(row, offset, shared[begin + offset : begin + end])
        result = np.asarray(filled.result)
        assert result.dtype == np.int64
        assert result.tolist() == [tokens[begin : begin + width] for begin in begins]


@pytest.mark.parametrize(
    ("packages", "expected", "result"),
    [
        ({"numpy", "torch"}, NumpyRows, torch.Tensor),
        ({"torch"}, TorchRows, torch.Tensor),
        ({"numpy"}, NumpyRows, memoryview),
        (set[str](), PlainRows, memoryview),
    ],
)
def test_the_fastest_class_for_the_installed_packages_is_used(
    monkeypatch: pytest.MonkeyPatch, packages: set[str], expected: type[Rows], result: type
) -> None:
    monkeypatch.setattr(rows, "_has", packages.__contains__)
    kind = rows.installed()
    assert kind is expected
    assert isinstance(kind(2, 3).result, result)


def test_torch_fills_rows_if_it_was_built_for_another_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(array: object) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch, "from_numpy", refuse)
    assert rows.installed() is TorchRows
