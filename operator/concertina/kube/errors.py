"""Exceptions for error responses of the API server."""

from __future__ import annotations

import json
from typing import Any


class ApiError(Exception):
    """Base class of error responses of the API server. `str()` returns the server's message."""

    def __init__(self, status: int, reason: str, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = causes


class Unauthorized(ApiError):
    """Error: the credentials are missing, invalid or expired."""


class Forbidden(ApiError):
    """Error: RBAC, a quota or an admission plugin refused the request."""


class NamespaceEnds(Forbidden):
    """Error: the namespace is being deleted, so the API server does not create objects in it."""


class NotFound(ApiError):
    """Error: the requested object does not exist."""


class NotServed(NotFound):
    """Error: the API server does not serve this API, because its CustomResourceDefinition is not installed."""


class Conflict(ApiError):
    """Error: a precondition (uid or resourceVersion) failed, or another client wrote at the same time."""


class AlreadyExists(Conflict):
    """Error: an object with the name of the new object already exists."""


class Gone(ApiError):
    """Error: the resourceVersion is too old, so the client must list the objects again."""


class Invalid(ApiError):
    """Error: the object violates its schema or a validation rule."""


class TestFailed(Invalid):
    """Error: a `test` operation of a JSON patch failed, because the object has changed."""

    __test__ = False  # the name is Kubernetes' term, and pytest must not collect the class


class Unreachable(ApiError):
    """Error: the API server gave no usable response within the time limit.

    Each attempt failed to connect, timed out, or got the status 429 or 5xx.
    """


class WebhookFailed(Unreachable):
    """Error: an admission webhook gave no usable response, so the API server refuses its objects for now."""


_KINDS: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
}


def status_object(body: bytes) -> dict[str, Any]:
    """Return the Kubernetes `Status` object in a response body; empty for any other body, such as a proxy's."""
    try:
        return _mapping(json.loads(body))
    except (ValueError, RecursionError):
        return {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def from_status(status: int, body: bytes) -> ApiError:
    """Return the exception for an HTTP status and a response body, which usually is a `Status` object."""
    parsed = status_object(body)
    message = str(parsed.get("message") or "")
    reason = str(parsed.get("reason") or "")
    if not parsed:
        message = body[:500].decode("utf-8", "replace").strip()
    details = _mapping(parsed.get("details"))
    raw_causes = details.get("causes")
    cause_objects = [_mapping(cause) for cause in raw_causes] if isinstance(raw_causes, list) else []
    causes = tuple(str(cause.get("message", "")) for cause in cause_objects)
    message = message or f"the API server answered {status}"
    kind = _KINDS.get(status, ApiError)
    if any(cause.get("reason") == "NamespaceTerminating" for cause in cause_objects):
        kind = NamespaceEnds
    if status == 422 and not details.get("kind"):
        # All other 422 responses for an object name its kind. This one only says that "the request" is invalid.
        kind = TestFailed
    if status == 404 and not parsed:
        kind, message = NotServed, "the API server does not serve this API: a CustomResourceDefinition is missing"
    if status == 500 and "failed calling webhook" in message:
        kind = WebhookFailed
    if status == 409 and reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(status, reason, message, causes)
