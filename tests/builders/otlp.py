"""Real receiver of OTLP over HTTP. It accepts what the official protobuf decodes, and can be made to misbehave."""

from __future__ import annotations

import contextlib
import enum
import gzip
import http.server
import itertools
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

AFTER_A_FAILURE = ("detect", "decide", "prepare", "assign", "start", "group", "build", "restore", "first_step")
"""Direct children of the span of a round that follows a failure of the bundled trainer."""


class Manner(enum.Enum):
    TAKES = enum.auto()
    REFUSES = enum.auto()
    """The receiver answers 503, and asks the sender to wait for a day."""
    HANGS = enum.auto()
    """The receiver reads what arrives, and does not answer."""
    BABBLES = enum.auto()
    """The receiver's answer never ends."""


@dataclass
class Receiver:
    endpoint: str
    manner: Manner = Manner.TAKES
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0
    """Number of bytes of endless answers."""
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def asked(self) -> int:
        return len(self.headers)

    def traces(self) -> dict[str, list[Span]]:
        """Traces by id, each in the order of time."""
        spans_by_trace: dict[str, list[Span]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano)):
            spans_by_trace[span.trace_id.hex()].append(span)
        return spans_by_trace


def attributes(span: Span) -> dict[str, object]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


def check_round(spans: Sequence[Span], job: str, failure: str, members: Collection[str]) -> Span:
    """Check that a trace is a whole round after that failure, with one part after the other.

    Return the round's span.
    """
    root, *parts = spans
    assert root.name == "round"
    assert attributes(root)["concertina.trainingjob.name"] == job
    direct = [span for span in parts if span.parent_span_id == root.span_id]
    assert tuple(span.name for span in direct) == AFTER_A_FAILURE
    assert {attributes(span)["k8s.pod.name"] for span in parts if span.name == "prepare member"} == set(members)
    for before, after in itertools.pairwise(direct):
        assert before.start_time_unix_nano <= after.start_time_unix_nano
        assert root.start_time_unix_nano <= before.end_time_unix_nano <= root.end_time_unix_nano
    assert attributes(direct[0])["concertina.failure"] == failure
    return root


@contextlib.contextmanager
def receiver(manner: Manner = Manner.TAKES, host: str = "127.0.0.1") -> Iterator[Receiver]:
    """Run a receiver that listens at `host`, an address of this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            here.headers.append({name.lower(): value for name, value in self.headers.items()})
            if here.manner is Manner.HANGS:
                here.over.wait()
            elif here.manner is Manner.REFUSES:
                self._answer(503, b"", {"Retry-After": "86400"})
            elif here.manner is Manner.BABBLES:
                self._babble()
            elif self.path != "/v1/traces" or self.headers["Content-Type"] != "application/x-protobuf":
                self._answer(415, b"", {})
            else:
                self._take(ExportTraceServiceRequest.FromString(body))

        def _take(self, request: ExportTraceServiceRequest) -> None:
            for of_resource in request.resource_spans:
                here.resources.append({each.key: each.value.string_value for each in of_resource.resource.attributes})
                for of_scope in of_resource.scope_spans:
                    here.spans.extend(of_scope.spans)
            self._answer(200, ExportTraceServiceResponse().SerializeToString(), {})

        def _babble(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not here.over.is_set():
                    here.sent += self.connection.send(b"x" * 65536)

        def _answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    here = Receiver(f"http://{host}:{server.server_address[1]}", manner)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield here
    finally:
        here.over.set()
        server.shutdown()
        server.server_close()
