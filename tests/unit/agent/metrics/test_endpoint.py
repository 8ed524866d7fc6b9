"""Port of a pod's metrics with any clients that reach it, over real sockets."""

from __future__ import annotations

import contextlib
import select
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from concertina.local.host import processes
from concertina_agent.metrics import endpoint
from concertina_agent.metrics.endpoint import MAX_CONNECTIONS, MAX_HEAD, Endpoint

BODY = b"# TYPE a gauge\na 1\n"


async def text() -> bytes:
    return BODY


async def breaks() -> bytes:
    raise ValueError("planted: s3cret")


async def hangs() -> bytes:
    raise TimeoutError


def serve(token: str | None = None, answer: object = text) -> int:
    (port,) = processes.free_ports("127.0.0.1", 1)
    Endpoint("127.0.0.1", port, token, answer).start()  # type: ignore[arg-type]
    return port


def ask(port: int, path: str = "/metrics", method: str = "GET", **fields: str) -> tuple[int, bytes, dict[str, str]]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=fields, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


@contextlib.contextmanager
def raw(port: int, sent: bytes = b"", source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(source, 0)) as connection:
        connection.sendall(sent)
        yield connection


def test_what_is_asked_for_is_answered() -> None:
    port = serve()
    status, body, fields = ask(port)
    assert (status, body, fields["Content-Type"]) == (200, BODY, "text/plain; version=0.0.4; charset=utf-8")
    assert ask(port, "/metrics?name=a")[:2] == (200, BODY)
    assert ask(port, method="HEAD")[:2] == (200, b"")
    assert ask(port, method="POST")[0] == 405
    assert ask(port, "/")[0] == 404
    assert ask(port, "/metricsx")[0] == 404


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer no"}, {"Authorization": "s3cret"}, {"x": "s3cret"}])
def test_a_token_is_asked_for(given: dict[str, str]) -> None:
    port = serve("s3cret")
    status, body, fields = ask(port, **given)
    assert (status, fields["WWW-Authenticate"]) == (401, "Bearer")
    assert b"Authorization: Bearer TOKEN" in body
    assert b"s3cret" not in body
    assert ask(port, Authorization="Bearer s3cret")[:2] == (200, BODY)


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer"}])
def test_for_want_of_its_token_nobody_is_answered(given: dict[str, str]) -> None:
    status, body, _ = ask(serve(""), **given)
    assert status == 401
    assert b"this pod has none" in body


def test_what_can_not_be_told_is_an_error_without_details_and_others_are_answered() -> None:
    status, body, _ = ask(serve(answer=breaks))
    assert (status, b"s3cret" in body) == (500, False)
    assert ask(serve(answer=hangs))[0] == 503


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x00\x00\r\n\r\n",
        b"GET /metrics SPDY\r\n\r\n",
        "GÉT ü ☃\r\n\r\n".encode(),
    ],
)
def test_what_is_no_request_is_refused(sent: bytes) -> None:
    port = serve()
    with raw(port, sent) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert ask(port)[0] == 200


def test_a_request_without_end_is_not_read() -> None:
    port = serve()
    much = b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * MAX_HEAD
    with contextlib.suppress(ConnectionError), raw(port, much) as connection:
        assert connection.recv(1000) == b""
    assert ask(port)[0] == 200


def test_a_crowd_of_silent_connections_from_one_address_keeps_nobody_out() -> None:
    port = serve()
    with contextlib.ExitStack() as opened:
        enter = opened.enter_context
        silent = [enter(raw(port, b"GET /met", source="127.9.9.9")) for _ in range(3 * MAX_CONNECTIONS)]
        assert ask(port)[:2] == (200, BODY)
        poll = select.poll()  # select() refuses descriptors from 1024 on, and the suite's process may have more
        for connection in silent:
            poll.register(connection, select.POLLIN)
        assert len(poll.poll(0)) >= 2 * MAX_CONNECTIONS, "no more than so many are open at a time"


def test_who_says_nothing_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 0.2)
    with raw(serve(), b"GET /met") as connection:
        assert connection.recv(1000) == b""


def test_who_reads_nothing_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.2)

    async def much() -> bytes:
        return b"x" * (64 << 20)

    with raw(serve(answer=much), b"GET /metrics HTTP/1.1\r\n\r\n") as connection:
        time.sleep(2.0)  # A closed connection shows only when it is read: ten times the limit, for a busy machine.
        read = 0
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 20):
                read += len(part)
        assert read < 64 << 20


def test_an_address_that_is_taken_is_an_error() -> None:
    port = serve()
    with pytest.raises(OSError, match="in use"):
        Endpoint("127.0.0.1", port, None, text).start()
