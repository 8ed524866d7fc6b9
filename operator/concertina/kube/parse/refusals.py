"""Classification of creates that the API server refused. Pure."""

from __future__ import annotations

import re

from concertina.kube.errors import Conflict, Forbidden, Invalid, WebhookFailed
from concertina.plan.observed import Refusal

FORBIDDEN = (
    (re.compile("exceeded (hierarchical )?quota|status unknown for quota"), Refusal.QUOTA),
    (re.compile("not yet ready to handle request"), Refusal.TRANSIENT),
    # The admission of owner references reads the list of kinds every 30 s, so it may not know a new CRD yet.
    (re.compile("cannot find RESTMapping"), Refusal.PERMISSION),
    (re.compile("cannot create resource"), Refusal.PERMISSION),
    (re.compile("not found$|no PriorityClass with name .* was found$"), Refusal.MISSING),
)
"""Kind of refusal by the message.

The authorizer and all admission plugins respond with the same 403 (decision "Kinds of refusals, read from the
message").
"""


def refusal(error: Forbidden | Invalid | Conflict | WebhookFailed) -> Refusal:
    """Return the kind of refusal that an error means."""
    if isinstance(error, Conflict):
        return Refusal.TRANSIENT
    if isinstance(error, WebhookFailed):
        return Refusal.WEBHOOK
    kinds = (kind for sentence, kind in FORBIDDEN if sentence.search(error.message))
    return next(kinds, Refusal.PERMANENT) if isinstance(error, Forbidden) else Refusal.PERMANENT
