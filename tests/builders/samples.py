"""Samples in an answer to GET /metrics, as Prometheus' own parser reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def total(samples: Samples, name: str, /, **labels: str) -> float:
    """Return the sum over all series of this name that have these labels."""
    return sum(v for (n, sample_labels), v in samples.items() if n == name and labels.items() <= set(sample_labels))
