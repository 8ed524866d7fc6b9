"""What the API server may answer instead of what was asked for, each with its own sentence."""

from __future__ import annotations

import json
from typing import Any


class ApiError(Exception):
    """An answer of the API server that is not a success. `str()` is the server's own sentence."""

    def __init__(self, status: int, reason: str, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = causes


class Unauthorized(ApiError):
    pass


class Forbidden(ApiError):
    """RBAC, a quota or an admission plugin said no."""


class NamespaceEnds(Forbidden):
    """Nothing can be made in a namespace that is being deleted, and that can't be taken back."""


class NotFound(ApiError):
    pass


class Conflict(ApiError):
    """A precondition (uid, resourceVersion) does not hold, or another write was in the way."""


class AlreadyExists(Conflict):
    """The name is taken. (A quota answers 409 too, where two writes meet.)"""


class Gone(ApiError):
    """The resourceVersion is too old: list again."""


class Invalid(ApiError):
    """The object breaks its schema or a rule."""


class TestFailed(Invalid):
    """A `test` of a JSON patch did not hold: somebody else was first."""

    __test__ = False  # the name is Kubernetes' word; pytest should not collect it


class Unreachable(ApiError):
    """No usable answer within the time the caller gives: refused, timed out, 429 or 5xx again and again."""


class WebhookFailed(Unreachable):
    """An admission webhook gave no usable answer, so the API server takes no such object meanwhile."""


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
    """Empty where it is anything else: proxies answer too."""
    try:
        return _mapping(json.loads(body))
    except (ValueError, RecursionError):
        return {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def from_status(status: int, body: bytes) -> ApiError:
    """The exception for an HTTP status and the `Status` object (or whatever else) in its body."""
    parsed = status_object(body)
    message = str(parsed.get("message") or "")
    reason = str(parsed.get("reason") or "")
    if not parsed:
        message = body[:500].decode("utf-8", "replace").strip()
    details = _mapping(parsed.get("details"))
    told = details.get("causes")
    listed = [_mapping(cause) for cause in told] if isinstance(told, list) else []
    causes = tuple(str(cause.get("message", "")) for cause in listed)
    message = message or f"the API server answered {status}"
    kind = _KINDS.get(status, ApiError)
    if any(cause.get("reason") == "NamespaceTerminating" for cause in listed):
        kind = NamespaceEnds
    if status == 422 and not details.get("kind"):
        kind = (
            TestFailed  # all other refusals of an object name its kind; this one says only that "the request" is wrong
        )
    if status == 500 and "failed calling webhook" in message:
        kind = WebhookFailed
    if status == 409 and reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(status, reason, message, causes)
