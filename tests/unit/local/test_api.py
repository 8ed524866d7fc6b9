"""Launcher's client, which keeps connections open for reads, against a real server over TLS."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from concertina.local.control_plane.api import Api, ControlPlaneError
from concertina.local.control_plane.certificates import ClusterAuthority

ADDRESS = "127.0.0.1"


class Handler(http.server.BaseHTTPRequestHandler):
    """Handler that counts connections.

    It refuses /refused, and closes the connection after /last without announcing it.
    """

    protocol_version = "HTTP/1.1"
    connections = 0
    requests: tuple[str, ...] = ()

    def setup(self) -> None:
        super().setup()
        Handler.connections += 1

    def do_GET(self) -> None:
        Handler.requests += (f"{self.command} {self.path}",)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"no" if self.path == "/refused" else b'{"ok": true}'
        self.send_response(409 if self.path == "/refused" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.path == "/last"

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Api]:
    authority = ClusterAuthority.create(folder)
    server_pair = authority.issue("server", "server", hosts=[ADDRESS])
    authority.issue("kubeconfig", "admin")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(server_pair.certificate, server_pair.key)
    Handler.connections, Handler.requests = 0, ()
    with http.server.ThreadingHTTPServer((ADDRESS, 0), Handler) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Api(ADDRESS, server.server_address[1], folder)
        server.shutdown()


def test_reads_share_a_connection_and_what_is_refused_leaves_it_whole(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        assert api.call("GET", "/") == {"ok": True}
        with pytest.raises(ControlPlaneError, match="no"):
            api.call("GET", "/refused")
        assert api.call("GET", "/") == {"ok": True}
        assert Handler.connections == 1


def test_a_connection_that_was_closed_meanwhile_is_opened_again(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        assert api.call("GET", "/last") == {"ok": True}
        assert api.call("GET", "/") == {"ok": True}
        assert Handler.connections == 2


def test_a_write_is_sent_once_and_never_on_a_connection_that_may_be_closed(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        api.call("GET", "/last")
        assert api.call("POST", "/", {"some": "thing"}) == {"ok": True}
        assert Handler.requests == ("GET /last", "POST /")
        assert Handler.connections == 2
