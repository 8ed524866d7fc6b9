"""Small blocking client of the API server, for requests of the local cluster itself. It needs no library."""

import contextlib
import http.client
import json
import ssl
from pathlib import Path
from typing import Any

MOST_IDLE = 8


class ControlPlaneError(Exception):
    """Error response of the API server. `status` is the HTTP status, and the text is the server's message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Client for the API server of the cluster in a state folder. It has administrator permissions."""

    def __init__(self, address: str, port: int, pki: Path) -> None:
        self._address, self._port = address, port
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "kubeconfig.crt", pki / "kubeconfig.key")
        self._idle: list[http.client.HTTPSConnection] = []
        """Idle connections, which further GET requests reuse.

        Most of the time of a GET request is the TLS handshake, and a caller that waits for an event sends many such
        requests.
        """

    def call(self, method: str, path: str, body: Any = None, timeout: float = 10.0) -> Any:
        """Send a request and return the decoded response.

        Raises:
            ControlPlaneError: When the API server refuses the request.
            OSError: When there is no response.
        """
        if method == "GET" and self._idle:
            # the connection may have been closed; only a read may be repeated
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                return self._call(self._idle.pop(), method, path, body, timeout)
        connection = http.client.HTTPSConnection(self._address, self._port, context=self._tls)
        return self._call(connection, method, path, body, timeout)

    def _call(self, connection: http.client.HTTPSConnection, method: str, path: str, body: Any, timeout: float) -> Any:
        """Send a request over a connection, and return the decoded response.

        Raises:
            ControlPlaneError: When the API server refuses the request.
            ConnectionError: When the response is not valid HTTP.
            OSError: When there is no response.
        """
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
        """Return whether the API server reports that an object exists at the path.

        The result is also False if the API server does not respond, or does not accept the client's certificate yet.
        """
        try:
            self.call("GET", path)
        except (OSError, ControlPlaneError):
            return False
        return True
