"""A small blocking client of the API server, for what the launcher itself has to ask; it needs no library."""

import contextlib
import http.client
import json
import ssl
from pathlib import Path
from typing import Any

MOST_IDLE = 8


class ControlPlaneError(Exception):
    """The API server refused: status is the HTTP status, the text is its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Requests to the API server of the cluster in a state folder, as its administrator."""

    def __init__(self, address: str, port: int, pki: Path) -> None:
        self._address, self._port = address, port
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "kubeconfig.crt", pki / "kubeconfig.key")
        self._idle: list[http.client.HTTPSConnection] = []
        """For further reads: most of what one costs is its handshake, and who waits for something reads very often."""

    def call(self, method: str, path: str, body: Any = None, timeout: float = 10.0) -> Any:
        """One request; returns the decoded answer. Raises ApiError when refused, OSError when nobody answers."""
        if method == "GET" and self._idle:
            with contextlib.suppress(ConnectionError, ssl.SSLError):  # closed meanwhile; only a read may be sent twice
                return self._call(self._idle.pop(), method, path, body, timeout)
        connection = http.client.HTTPSConnection(self._address, self._port, context=self._tls)
        return self._call(connection, method, path, body, timeout)

    def _call(self, connection: http.client.HTTPSConnection, method: str, path: str, body: Any, timeout: float) -> Any:
        connection.timeout = timeout
        if connection.sock:
            connection.sock.settimeout(timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionError(str(error)) from error
        except OSError:
            connection.close()
            raise
        if len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        if response.status >= 300:
            raise ControlPlaneError(response.status, text)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def exists(self, path: str) -> bool:
        """Whether there is such an object now; False too while the API server does not answer or not yet knows us."""
        try:
            self.call("GET", path)
        except (OSError, ControlPlaneError):
            return False
        return True
