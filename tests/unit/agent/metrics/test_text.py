"""Text format of the metrics: Prometheus' own parser reads back any labels and numbers that the agent writes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse

from builders.prometheus import needed, promtool
from concertina_agent.metrics import families as f
from concertina_agent.metrics.exposition import LONGEST_VALUE, Histogram, MetricSample, render

BASE = (("namespace", "n"), ("trainingjob", "j"), ("replica", "j-0-0"))


def read(samples: list[MetricSample]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = parse(render(samples, BASE).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def key(name: str, /, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted({**dict(BASE), **labels}.items()))


@given(st.text(), st.floats(allow_nan=False) | st.integers())
def test_any_label_and_number_is_read_back(label: str, value: float) -> None:
    records_read = read([MetricSample(f.METRIC, value, (label,))])
    shown = label[:LONGEST_VALUE].encode("utf-8", "replace").decode()
    try:
        expected = float(value)
    except OverflowError:
        expected = math.inf
    assert records_read == {key("concertina_training_metric", name=shown): pytest.approx(expected, rel=1e-15)}


def test_what_is_no_number_is_one_for_prometheus() -> None:
    assert math.isnan(read([MetricSample(f.LOSS, math.nan)])[key("concertina_training_loss")])
    assert read([MetricSample(f.STEP, 10**400)]) == {key("concertina_training_step"): math.inf}
    assert "concertina_training_step{" in render([MetricSample(f.STEP, 3)], BASE).decode()
    assert render([MetricSample(f.STEP, 3)], BASE).decode().endswith(" 3\n")


def test_a_series_that_comes_twice_is_told_once() -> None:
    assert read([MetricSample(f.METRIC, 1.0, ("a",)), MetricSample(f.METRIC, 2.0, ("a",))]) == {
        key("concertina_training_metric", name="a"): 1.0
    }


def test_a_histogram_counts_up() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds, times in ((0.1, 1), (0.5, 3), (7.0, 1)):
        histogram.observe(seconds, times)
    name = f.STEP_SECONDS.name
    assert read([MetricSample(f.STEP_SECONDS, histogram)]) == {
        key(f"{name}_bucket", le="0.1"): 1,
        key(f"{name}_bucket", le="1"): 4,
        key(f"{name}_bucket", le="+Inf"): 5,
        key(f"{name}_sum"): pytest.approx(8.6),
        key(f"{name}_count"): 5,
    }


@needed
def test_promtool_finds_nothing_to_say_of_the_names() -> None:
    samples = [
        MetricSample(each, Histogram((1.0,)) if each.kind is f.MetricKind.HISTOGRAM else 1.0, tuple(each.labels))
        for each in f.ALL
    ]
    done = promtool("check", "metrics", stdin=render(samples, BASE))
    output = (done.stdout + done.stderr).decode().splitlines()
    dcgm = [line for line in output if line.startswith("concertina_gpu_") and "camelCase" in line]  # its labels are so
    ratios = [line for line in output if "bits_per_byte use base unit" in line]  # the usual name of the ratio
    assert sorted(output) == sorted(dcgm + ratios)
