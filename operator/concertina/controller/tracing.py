"""Rounds as OpenTelemetry traces, to a collector by OTLP over HTTP. They are sent beside the passes, in a thread of the
SDK's, and dropped where that is behind: no pass ever waits for a collector (decision "Traces are dropped, not waited
for"). Where and how they are sent is said by OpenTelemetry's own variables (docs/tracing.md)."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import requests
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from concertina import metrics
from concertina.plan.actions import RoundTrace, Span
from concertina_protocol.traces import trace_id

NAME = "concertina-operator"
"""Of the service, where OTEL_SERVICE_NAME says no other."""
QUEUE = 8192
"""Spans that wait to be sent: 600 rounds of small jobs."""
BATCH, DELAY_SECONDS = 512, 1.0
FAREWELL_SECONDS = 2.0
"""For what waits, when the operator ends."""
NANO = 10**9


class SpanResult(enum.StrEnum):
    EXPORTED = "exported"
    FAILED = "failed"
    """The collector did not take them, or not in time."""
    DROPPED = "dropped"
    """Too many waited."""


metrics.begin_at_zero(metrics.TRACE_SPANS, SpanResult)
Export = Callable[[str, RoundTrace], None]
"""Takes a job's uid and the trace of one of its rounds; returns at once."""


@contextlib.asynccontextmanager
async def exporting(on: bool) -> AsyncIterator[Export | None]:
    """None where traces are off."""
    if not on:
        yield None
        return
    session = requests.Session()
    session.stream = True  # what a collector answers is never read, however much that is
    traces = _Traces(OTLPSpanExporter(session=session))
    try:
        yield traces.export
    finally:
        ended = threading.Thread(target=traces.close, name="last traces", daemon=True)
        ended.start()
        await asyncio.to_thread(ended.join, FAREWELL_SECONDS)
        traces.give_up()


class _Ids(RandomIdGenerator):
    """The next trace's id is known."""

    trace = 0

    def generate_trace_id(self) -> int:
        return self.trace


class _Counted(SpanExporter):
    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended = threading.Event()
        self.done = 0
        """Spans that wait no more; counted in the SDK's thread alone."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
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
        """Ends a wait between two tries, too."""
        if not self._ended.is_set():
            self._ended.set()
            self._exporter.shutdown()


class _Traces:
    def __init__(self, exporter: SpanExporter) -> None:
        self._ids, self._counted = _Ids(), _Counted(exporter)
        resource = Resource({"service.name": NAME}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._counted, QUEUE, DELAY_SECONDS * 1000, max_export_batch_size=BATCH)
        )
        self._tracer = self._provider.get_tracer("concertina")
        self._taken = 0

    def close(self) -> None:
        """Returns when all that waits was sent, or `give_up` was called."""
        self._provider.shutdown()

    def give_up(self) -> None:
        self._counted.shutdown()

    def export(self, uid: str, round: RoundTrace) -> None:
        """A trace is dropped whole: half of one tells nothing."""
        size = _size(round.root)
        if self._taken - self._counted.done + size > QUEUE:
            metrics.TRACE_SPANS.labels(SpanResult.DROPPED).inc(size)
            return
        self._ids.trace = int(trace_id(uid, round.round), 16)
        self._emit(round.root, trace.set_span_in_context(trace.INVALID_SPAN))

    def _emit(self, told: Span, parent: Context) -> None:
        span = self._tracer.start_span(
            told.name, parent, attributes=dict(told.attributes), start_time=int(told.begin * NANO)
        )
        self._taken += span.is_recording()
        if told.error:
            span.set_status(trace.Status(trace.StatusCode.ERROR, told.error))
        within = trace.set_span_in_context(span)
        for child in told.children:
            self._emit(child, within)
        span.end(int(told.end * NANO))


def _size(span: Span) -> int:
    return 1 + sum(map(_size, span.children))
