"""Interface of the exporter of rounds' traces, without OpenTelemetry (`otlp_traces`)."""

from __future__ import annotations

import enum
from collections.abc import Callable

from concertina import metrics
from concertina.plan.actions import RoundTrace


class SpanResult(enum.StrEnum):
    """Result for a span, as a label of the metric."""

    EXPORTED = "exported"
    FAILED = "failed"
    """The collector did not accept the span, or not in time."""
    DROPPED = "dropped"
    """Too many spans were waiting."""


metrics.begin_at_zero(metrics.TRACE_SPANS, SpanResult)
Export = Callable[[str, RoundTrace], None]
"""Function that takes a job's uid and the trace of one of its rounds, and returns immediately."""
