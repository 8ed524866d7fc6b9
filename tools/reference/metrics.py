"""Reference page of all metrics, generated from the metric objects in the code."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics import MetricWrapperBase
from tools.reference import markdown

from concertina import metrics as operator_metrics
from concertina.controller import job_metrics
from concertina_agent.metrics import families

INTRODUCTION = """
All metrics with type and labels, from the code that serves them. [Metrics](../metrics.md) explains how Prometheus finds
them and how to use them.
"""
PROCESS = "The operator also serves the `process_*` metrics of prometheus_client."


def page() -> str:
    """Return the text of the page."""
    job_labels, pod_labels = (", ".join(f"`{x}`" for x in y) for y in (job_metrics.JOB_LABELS, families.POD_LABELS))
    return markdown.page(
        "Metrics",
        INTRODUCTION,
        f"## Operator\n\n{PROCESS}\n\n{markdown.entries(_operator())}",
        f"## Jobs\n\nServed by the operator. Each has the labels {job_labels}.\n\n{markdown.entries(_jobs())}",
        f"## Training pods\n\nServed by the agent. Each has the labels {pod_labels}.\n\n{markdown.entries(_pods())}",
    )


def _operator() -> Iterator[tuple[str, str]]:
    """Yield an entry for each of the operator's metrics.

    prometheus_client has the label names of a metric only in a private attribute.
    """
    collectors = dict.fromkeys(operator_metrics.REGISTRY._collector_to_names)
    for metric in collectors:
        if isinstance(metric, MetricWrapperBase):
            family = metric.describe()[0]
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield _entry(name, family.type, metric._labelnames, family.documentation)


def _jobs() -> Iterator[tuple[str, str]]:
    for family in job_metrics.FAMILIES:
        yield _entry(family.asked_for, "counter" if family.counter else "gauge", family.labels, family.help)


def _pods() -> Iterator[tuple[str, str]]:
    for family in families.ALL:
        yield _entry(family.name, family.kind.value, family.labels, family.help)


def _entry(name: str, kind: str, labels: tuple[str, ...], text: str) -> tuple[str, str]:
    marks = f"*{kind}*" + (f", labels {', '.join(markdown.code(label) for label in labels)}" if labels else "")
    return f"`{name}`: {marks}", markdown.safe(text)
