"""Proxy in front of a real S3 server that injects the faults that a test asks for, over plain HTTP or TLS."""

from __future__ import annotations

import collections
import contextlib
import http.client
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.faults: list[tuple[str, str, str]] = []
        """Faults, each of which occurs once: method, part of the path, and the kind: cut, truncate, flip, flip-request,
        or a status."""
        self.done: list[str] = []
        self.sent: collections.Counter[str] = collections.Counter()
        """Bytes of the bodies that were sent, by path."""
        self.delay = 0.0
        """Seconds by which each body that arrives is delayed."""
        self._lock = threading.Lock()
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server_address[1]}"

    def fault(self, method: str, path: str) -> str:
        with self._lock:
            for entry in self.faults:
                if entry[0] == method and entry[1] in path:
                    self.faults.remove(entry)
                    self.done.append(entry[2])
                    return entry[2]
        return ""

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of connections, because cutting them is the purpose of this proxy."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass(self) -> None:
        fault = self.server.fault(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.server.delay if body else 0.0)
        if fault == "cut":
            self.close_connection = True
            return
        if fault.isdigit():
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "flip-request":
            body = _flipped(body)
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body or None)
        answer = upstream.getresponse()
        content = answer.read()
        if fault == "flip":
            content = _flipped(content)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if fault == "truncate":
            content = content[: len(content) // 2]
            self.close_connection = True
        self.wfile.write(content)
        self.server.sent[urlsplit(self.path).path] += len(content)
        upstream.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def log_message(self, format: str, *args: object) -> None:
        pass


def _flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


@contextlib.contextmanager
def proxy(upstream: str, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    server = Proxy(upstream, tls)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
