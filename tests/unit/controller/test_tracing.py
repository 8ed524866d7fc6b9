"""Traces as a collector receives them over the network.

A collector that is gone, slow or hostile affects only traces.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from builders.counted import counted
from builders.otlp import Manner, Receiver, attributes, receiver
from builders.until import until, until_async
from concertina.controller import operator, otlp_traces, tracing
from concertina.controller.settings import OperatorSettingsError, from_environment
from concertina.controller.tracing import SpanResult
from concertina.local.host import processes
from concertina.plan.actions import RoundTrace, Span, SpanName
from concertina_protocol.traces import trace_id

UID, T0 = "uid-1", 1_800_000_000.0
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SETTINGS = {"CONCERTINA_NAMESPACE": "n", "CONCERTINA_MASTER_KEY_SECRET": "s", "CONCERTINA_IMAGE_AGENT": "i"}


def of_round(number: int, members: int = 1) -> RoundTrace:
    each = Span(SpanName.PREPARE_MEMBER, T0 + 1, T0 + 1.5, {"k8s.pod.name": "a"}, error="no answer")
    prepare = Span(SpanName.PREPARE, T0 + 1, T0 + 2, {"concertina.replicas.asked": members}, (each,) * members)
    return RoundTrace(number, Span(SpanName.ROUND, T0, T0 + 3, {"concertina.round": number}, (prepare,)))


def results() -> dict[str, int]:
    return {result: int(counted("concertina_trace_spans_total", result=result)) for result in SpanResult}


def exported(then: Callable[[tracing.Export], None]) -> dict[str, int]:
    """Return the results of the spans that `then` made."""
    before = results()

    async def scenario() -> None:
        async with operator.exporting(True) as export:
            assert export is not None
            then(export)

    asyncio.run(scenario())
    until(lambda: not sending(), "an end of what is under way", sending)
    return {result: count - before[result] for result, count in results().items()}


def sending() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "last traces"]


def test_a_trace_arrives_under_the_id_that_everybody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.cluster.name=here")
    with receiver() as there:
        monkeypatch.setenv(ENDPOINT, there.endpoint)
        found = exported(lambda export: [export(UID, of_round(number)) for number in (3, 4)] and None)
        assert found == {"exported": 6, "failed": 0, "dropped": 0}
        assert there.traces().keys() == {trace_id(UID, 3), trace_id(UID, 4)}
        root, prepare, member = there.traces()[trace_id(UID, 3)]
        assert [span.name for span in (root, prepare, member)] == ["round", "prepare", "prepare member"]
        assert (root.parent_span_id, prepare.parent_span_id) == (b"", root.span_id)
        assert member.parent_span_id == prepare.span_id
        assert (root.start_time_unix_nano, root.end_time_unix_nano) == (int(T0) * 10**9, int(T0 + 3) * 10**9)
        assert attributes(prepare) == {"concertina.replicas.asked": 1}
        assert (member.status.code, member.status.message, root.status.code) == (2, "no answer", 0)
        names = {"service.name": otlp_traces.NAME, "k8s.cluster.name": "here"}
        assert [names.items() <= each.items() for each in there.resources] == [True] * len(there.resources)
        assert {each["authorization"] for each in there.headers} == {"Bearer s3cret"}


@pytest.mark.parametrize("manner", [Manner.HANGS, Manner.REFUSES, None], ids=lambda manner: manner and manner.name)
def test_a_bad_collector_takes_traces_and_nothing_else(
    manner: Manner | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the collector does not answer, more spans are accepted than there is room for, and dropped in whole traces.

    The end of the operator does not wait. None stands for a collector that does not listen.
    """
    monkeypatch.setattr(otlp_traces, "FAREWELL_SECONDS", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret")
    traces, size = 500, 2 + 30

    def full(export: tracing.Export) -> None:
        for number in range(traces):
            export(UID, of_round(number + 1, members=30))

    def tried(there: Receiver | None) -> None:
        found = exported(full)
        assert sum(found.values()) == traces * size, "each is counted once"
        assert found["exported"] == 0
        assert found["dropped"] % size == 0
        assert found["dropped"] or manner is Manner.REFUSES, "which is fast at that"
        assert there is None or there.asked >= 1

    if manner is None:
        (port,) = processes.free_ports("127.0.0.1", 1)
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{port}")
        tried(None)
    else:
        with receiver(manner) as there:
            monkeypatch.setenv(ENDPOINT, there.endpoint)
            tried(there)
    assert "s3cret" not in caplog.text


def test_an_answer_without_an_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver(Manner.BABBLES) as there:
        monkeypatch.setenv(ENDPOINT, there.endpoint)
        assert exported(lambda export: export(UID, of_round(1))) == {"exported": 3, "failed": 0, "dropped": 0}
        assert there.sent < 32 * 2**20, "what buffers of sockets hold"


def test_a_collector_that_comes_back_is_told_what_happens_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_traces, "DELAY_SECONDS", 0.05)
    before = results()

    async def scenario(there: Receiver) -> None:
        async with operator.exporting(True) as export:
            assert export is not None
            export(UID, of_round(1))
            await until_async(lambda: results()["failed"] > before["failed"], "spans that failed", results)
            there.manner = Manner.TAKES
            export(UID, of_round(2))

    with receiver(Manner.REFUSES) as there:
        monkeypatch.setenv(ENDPOINT, there.endpoint)
        asyncio.run(scenario(there))
        assert there.traces().keys() == {trace_id(UID, 2)}


def test_there_are_none_unless_a_collector_is_named() -> None:
    assert not from_environment(SETTINGS).tracing
    for name in (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        assert from_environment({**SETTINGS, name: "https://collector:4318"}).tracing

    async def scenario() -> None:
        async with operator.exporting(False) as export:
            assert export is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("ENDPOINT", "collector:4318", "ENDPOINT is 'collector:4318'; it must be a URL as http://collector:4318"),
        ("TRACES_ENDPOINT", "http://", "TRACES_ENDPOINT is 'http://'; it must be a URL"),
        ("ENDPOINT", "http://[x", "it must be a URL"),
        ("PROTOCOL", "grpc", "PROTOCOL is 'grpc'; this operator speaks http/protobuf"),
        ("HEADERS", "s3cret", "HEADERS must be name=value"),
        ("TRACES_HEADERS", 'a=b,c="s3cret"', "TRACES_HEADERS must be name=value"),
        ("HEADERS", "a=b\ns3cret", "HEADERS must be name=value"),
    ],
)
def test_what_a_collector_can_not_be_reached_by_is_said(variable: str, value: str, sentence: str) -> None:
    environment = {**SETTINGS, ENDPOINT: "http://collector:4318", f"OTEL_EXPORTER_OTLP_{variable}": value}
    with pytest.raises(OperatorSettingsError, match=sentence.replace("[", r"\[")) as refused:
        from_environment(environment)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("value", ["a=b", "a=b,c-d = e f", "authorization=Bearer%20x==,b=", "a=b,", "a=b, c=d\n"])
def test_headers_as_opentelemetry_has_them(value: str) -> None:
    assert from_environment({**SETTINGS, ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_HEADERS": value}).tracing
