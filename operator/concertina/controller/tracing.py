"""Types for the export of traces. This module does not import OpenTelemetry (`otlp_traces` does)."""

from __future__ import annotations

import enum
from collections.abc import Callable

from concertina import metrics
from concertina.plan.actions import RoundTrace


class SpanResult(enum.StrEnum):
    """Result of the export of a span, as a metric label."""

    EXPORTED = "exported"
    FAILED = "failed"
    """The collector did not accept the span in time."""
    DROPPED = "dropped"
    """The queue of spans was full."""


metrics.begin_at_zero(metrics.TRACE_SPANS, SpanResult)
Export = Callable[[str, RoundTrace], None]
"""Function that queues the trace of a round for export and returns immediately.

Its arguments are the job's uid and the trace.
"""
