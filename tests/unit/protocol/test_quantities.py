"""Kubernetes quantities: they are read exactly, and anything else is refused."""

from __future__ import annotations

from decimal import Decimal

import pytest

from concertina_protocol.quantities import MOST, parse_quantity


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (2, "2"), ("2", "2"), ("1.5", "1.5"), (".5", "0.5"), ("1.", "1"), ("+1", "1"), ("-2Ki", "-2048"),
        ("1n", "1e-9"), ("100u", "1e-4"), ("1500m", "1.5"), ("1e3", "1000"), ("12E-1", "1.2"),
        ("1k", "1e3"), ("500M", "5e8"), ("1G", "1e9"), ("1T", "1e12"), ("1P", "1e15"), ("1E", "1e18"),
        ("1Ki", str(2**10)), ("1.5Mi", str(3 * 2**19)), ("8Gi", str(2**33)), ("1Ti", str(2**40)), ("1Pi", str(2**50)),
        ("1Ei", str(2**60)), ("0.123456789012345678901234567890123m", "123456789012345678901234567890123e-36"),
    ],
)  # fmt: skip
def test_a_quantity_has_its_exact_value(quantity: object, value: str) -> None:
    assert parse_quantity(quantity) == Decimal(value)


@pytest.mark.parametrize("quantity", ["8Ei", "1e99", "9" * 40 + "Ei"])
def test_a_large_quantity_is_capped_as_kubernetes_caps_it(quantity: str) -> None:
    assert parse_quantity(quantity) == MOST
    assert parse_quantity(f"-{quantity}") == -MOST


@pytest.mark.parametrize(
    "quantity",
    [None, "", ".", "Gi", "lots", "1K", "1e3Ki", "1.2.3", "1_0", "NaN", "Infinity", "1e100", "9" * 41, "1 Gi"],
)
def test_what_is_no_quantity_is_refused(quantity: object) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(quantity)
