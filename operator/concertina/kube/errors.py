"""Errors of the API server, each with its message."""

from __future__ import annotations

import json
from typing import Any


class ApiError(Exception):
    """Unsuccessful response of the API server. `str()` is the server's own message."""

    def __init__(self, status: int, reason: str, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = causes


class Unauthorized(ApiError):
    """The credentials are missing, invalid or expired."""


class Forbidden(ApiError):
    """RBAC, a quota or an admission plugin refused the request."""


class NamespaceEnds(Forbidden):
    """The namespace is being deleted, so no object can be created in it. This cannot be undone."""


class NotFound(ApiError):
    """The object does not exist."""


class Conflict(ApiError):
    """A precondition (uid, resourceVersion) does not hold, or another write interfered."""


class AlreadyExists(Conflict):
    """The name is taken. A quota responds with 409 too, when two writes meet."""


class Gone(ApiError):
    """The resourceVersion is too old: list again."""


class Invalid(ApiError):
    """The object violates its schema or a rule."""


class TestFailed(Invalid):
    """A `test` of a JSON patch did not hold, because another write came first."""

    __test__ = False  # the name is Kubernetes' term; pytest must not collect it


class Unreachable(ApiError):
    """No usable response came within the caller's time limit: refused, timed out, or repeatedly 429 or 5xx."""


class WebhookFailed(Unreachable):
    """An admission webhook gave no usable response, so the API server accepts no such object meanwhile."""


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
    """Return the `Status` object in the body, or an empty one for any other body: proxies respond too."""
    try:
        return _mapping(json.loads(body))
    except (ValueError, RecursionError):
        return {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def from_status(status: int, body: bytes) -> ApiError:
    """Return the exception for an HTTP status and the `Status` object (or anything else) in its body."""
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
        # All other refusals of an object name its kind. This one only says that "the request" is invalid.
        kind = TestFailed
    if status == 500 and "failed calling webhook" in message:
        kind = WebhookFailed
    if status == 409 and reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(status, reason, message, causes)
