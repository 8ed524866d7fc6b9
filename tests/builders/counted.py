"""What the metrics of this process say."""

from __future__ import annotations

from concertina.metrics import REGISTRY


def counted(sample: str, **labels: str) -> float:
    """The value of a series; 0 where there is none."""
    return REGISTRY.get_sample_value(sample, labels) or 0.0
