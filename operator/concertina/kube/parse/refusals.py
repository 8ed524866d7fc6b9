"""Classify error responses for objects that the API server refused to create. All functions are pure."""

from __future__ import annotations

import re

from concertina.kube.errors import Conflict, Forbidden, Invalid, WebhookFailed
from concertina.plan.observed import Refusal

FORBIDDEN = (
    (re.compile("exceeded (hierarchical )?quota|status unknown for quota"), Refusal.QUOTA),
    (re.compile("not yet ready to handle request"), Refusal.TRANSIENT),
    # The admission plugin for owner references updates its list of kinds every 30 s, and may not know a new CRD yet.
    (re.compile("cannot find RESTMapping"), Refusal.PERMISSION),
    (re.compile("cannot create resource"), Refusal.PERMISSION),
    (re.compile("not found$|no PriorityClass with name .* was found$"), Refusal.MISSING),
)
"""Patterns in the API server's message with status 403, each with the kind of refusal that it identifies.

The authorizer and all admission plugins use the same status 403 (decision "Refused pods are classified by the
message").
"""


def refusal(error: Forbidden | Invalid | Conflict | WebhookFailed) -> Refusal:
    """Return the kind of refusal from the API server's error response for an object that it refused to create.

    The kind says what must change before the API server accepts the object.
    """
    if isinstance(error, Conflict):
        return Refusal.TRANSIENT
    if isinstance(error, WebhookFailed):
        return Refusal.WEBHOOK
    kinds = (kind for sentence, kind in FORBIDDEN if sentence.search(error.message))
    return next(kinds, Refusal.PERMANENT) if isinstance(error, Forbidden) else Refusal.PERMANENT
