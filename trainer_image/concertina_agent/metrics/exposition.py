"""Conversion of metrics to Prometheus' text format, version 0.0.4. Pure functions."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Union

from concertina_agent.metrics.families import MetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LONGEST_VALUE = 256
"""Maximum length in characters of a label's value. Names of jobs and replicas are shorter."""


class Histogram:
    """Histogram with counts by bucket. `buckets` contains the upper bounds in increasing order, without infinity."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = tuple(buckets), [0] * (len(buckets) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def parts(self) -> Iterable[tuple[str, tuple[tuple[str, str], ...], float]]:
        """Yield each series of the histogram as the suffix of its name, its labels and its value."""
        below = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts):
            below += count
            yield "_bucket", (("le", number(bound)),), below
        yield "_sum", (), self._sum
        yield "_count", (), below


@dataclasses.dataclass(frozen=True)
class MetricSample:
    """Value of one metric with its labels."""

    family: MetricFamily
    value: Union[float, Histogram]
    labels: tuple[str, ...] = ()
    """Values, in order, of the labels that the metric's MetricFamily lists."""
    more: tuple[tuple[str, str], ...] = ()
    """Names and values of additional labels."""


def render(samples: Iterable[MetricSample], base: tuple[tuple[str, str], ...]) -> bytes:
    """Return the samples in Prometheus' text format.

    If a series occurs twice, only the first sample is used, because Prometheus would refuse the whole scrape.

    Args:
        samples: Samples of all metrics.
        base: Labels that are added to each series, before its own labels.
    """
    families: dict[MetricFamily, dict[str, float]] = {}
    for sample in samples:
        series = families.setdefault(sample.family, {})
        own = tuple(zip(sample.family.labels, sample.labels))
        values = sample.value.parts() if isinstance(sample.value, Histogram) else (("", (), sample.value),)
        for suffix, le, value in values:
            pairs = (*base, *own, *sample.more, *le)
            labels = ",".join(f'{name}="{_escaped(text)}"' for name, text in pairs)
            series.setdefault(f"{sample.family.name}{suffix}{{{labels}}}", value)
    text: list[str] = []
    for family, series in families.items():
        text += (f"# HELP {family.name} {family.help}\n", f"# TYPE {family.name} {family.kind.value}\n")
        text += (f"{name} {number(value)}\n" for name, value in series.items())
    return "".join(text).encode()


def number(value: float) -> str:
    """Return a number in Prometheus' format."""
    try:
        value = float(value)
    except OverflowError:  # a step may be any integer
        value = math.inf
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _escaped(text: str) -> str:
    text = text[:LONGEST_VALUE].encode("utf-8", "replace").decode()  # a lone surrogate can't be encoded
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
