"""Deeply nested JSON: deep values are cut out, and nothing else is changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concertina.kube.deep_json import DEEPEST, LEFT_OUT, cut, dumps, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(VALUES)
def test_what_is_not_nested_deeply_is_read_as_it_is(value: Any) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert cut(text) == text


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_written_is_read_again_half_a_surrogate_pair_too(text: str) -> None:
    assert json.loads(dumps({"text": text})) == loads(json.dumps({"text": text})) == {"text": text}


@pytest.mark.parametrize("levels", [1, DEEPEST - 1, DEEPEST, DEEPEST + 1, 900, 5000])
@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")])
def test_the_deepest_that_is_kept(opening: str, closing: str, levels: int) -> None:
    text = (opening * levels + "1" + closing * levels).encode()
    assert (LEFT_OUT.encode() in cut(text)) == (levels > DEEPEST)
    assert (cut(text) == text) == (levels <= DEEPEST)


@pytest.mark.parametrize(("opening", "closing"), [('{"a\\"[{":', "}"), ("[", "]")])
def test_what_is_nested_deeply_is_left_out(opening: str, closing: str) -> None:
    deep = opening * 100_000 + "1" + closing * 100_000
    read = loads(f'{{"items": [{{"x": {deep}, "y": [2]}}, {{"z": "}}"}}]}}')
    assert read["items"][1] == {"z": "}"}
    assert read["items"][0]["y"] == [2]
    inner, levels = read["items"][0]["x"], 3
    while inner != LEFT_OUT:
        inner, levels = (inner[0] if isinstance(inner, list) else next(iter(inner.values()))), levels + 1
    assert levels == DEEPEST
