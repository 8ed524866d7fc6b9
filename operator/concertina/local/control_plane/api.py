"""A small blocking client of the API server, for what the launcher itself has to ask; it needs no library."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any


class ApiError(Exception):
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

    def call(self, method: str, path: str, body: Any = None, timeout: float = 10.0) -> Any:
        """One request; returns the decoded answer. Raises ApiError when refused, OSError when nobody answers."""
        connection = http.client.HTTPSConnection(self._address, self._port, timeout=timeout, context=self._tls)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()
        if response.status >= 300:
            raise ApiError(response.status, text)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def exists(self, path: str) -> bool:
        """Whether there is such an object now; False too while the API server does not answer or not yet knows us."""
        try:
            self.call("GET", path)
        except (OSError, ApiError):
            return False
        return True
