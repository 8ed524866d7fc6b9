"""Export of one OpenTelemetry trace per round to a collector, by OTLP over HTTP.

A thread of the SDK sends the traces. If the thread can't keep up, traces are dropped, so that no planning pass waits
for a collector (decision "Traces are dropped, not waited for"). OpenTelemetry's environment variables set the
destination and other options (docs/tracing.md).

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import requests
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from concertina import metrics
from concertina.controller.tracing import Export, SpanResult
from concertina.plan.actions import RoundTrace, Span
from concertina_protocol.traces import trace_id

NAME = "concertina-operator"
"""Service name in the traces, unless OTEL_SERVICE_NAME is set."""
QUEUE = 8192
"""Largest number of spans in the queue. The traces of 600 rounds of small jobs fit."""
BATCH, DELAY_SECONDS = 512, 1.0
FAREWELL_SECONDS = 2.0
"""Time limit in seconds to send the queued spans when the operator stops."""
NANO = 10**9


@contextlib.asynccontextmanager
async def exporting() -> AsyncIterator[Export]:
    """Yield the function that exports traces. At the end of the context, send the traces that are still queued."""
    session = requests.Session()
    session.stream = True  # the body of a collector's answer is never read, so its size does not matter
    traces = _Traces(OTLPSpanExporter(session=session))
    try:
        yield traces.export
    finally:
        ended = threading.Thread(target=traces.close, name="last traces", daemon=True)
        ended.start()
        await asyncio.to_thread(ended.join, FAREWELL_SECONDS)
        traces.give_up()


class _Ids(RandomIdGenerator):
    """Generator of OpenTelemetry ids. Each new trace gets the id that was set in the attribute `trace`."""

    trace = 0

    def generate_trace_id(self) -> int:
        return self.trace


class _Counted(SpanExporter):
    """Span exporter that counts the exported spans in a metric, by result."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended = threading.Event()
        self.done = 0
        """Number of spans that the SDK has taken from the queue. Only the SDK's thread changes it."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans. After `shutdown`, count them as failed instead."""
        result = SpanExportResult.FAILURE
        try:
            if not self._ended.is_set():
                result = self._exporter.export(spans)
        finally:
            self.done += len(spans)
            counted = SpanResult.EXPORTED if result is SpanExportResult.SUCCESS else SpanResult.FAILED
            metrics.TRACE_SPANS.labels(counted).inc(len(spans))
        return result

    def shutdown(self) -> None:
        """Stop the export, and interrupt the wait before a retry if there is one."""
        if not self._ended.is_set():
            self._ended.set()
            self._exporter.shutdown()


class _Traces:
    """Exporter of the traces of rounds, with a bounded queue of spans.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._ids, self._counted = _Ids(), _Counted(exporter)
        resource = Resource({"service.name": NAME}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._counted, QUEUE, DELAY_SECONDS * 1000, max_export_batch_size=BATCH)
        )
        self._tracer = self._provider.get_tracer("concertina")
        self._queued = 0

    def close(self) -> None:
        """Wait until all queued spans are sent, or until `give_up` is called."""
        self._provider.shutdown()

    def give_up(self) -> None:
        """Drop all spans that are still queued, so that `close` returns."""
        self._counted.shutdown()

    def export(self, uid: str, round: RoundTrace) -> None:
        """Queue the trace of a round. If the queue has no space for all its spans, drop the whole trace."""
        size = _size(round.root)
        if self._queued - self._counted.done + size > QUEUE:
            metrics.TRACE_SPANS.labels(SpanResult.DROPPED).inc(size)
            return
        self._ids.trace = int(trace_id(uid, round.round), 16)
        self._emit(round.root, trace.set_span_in_context(trace.INVALID_SPAN))

    def _emit(self, recorded: Span, parent: Context) -> None:
        span = self._tracer.start_span(
            recorded.name, parent, attributes=dict(recorded.attributes), start_time=int(recorded.begin * NANO)
        )
        self._queued += span.is_recording()
        if recorded.error:
            span.set_status(trace.Status(trace.StatusCode.ERROR, recorded.error))
        within = trace.set_span_in_context(span)
        for child in recorded.children:
            self._emit(child, within)
        span.end(int(recorded.end * NANO))


def _size(span: Span) -> int:
    return 1 + sum(map(_size, span.children))
