"""Error messages for failed requests to object stores.

A message says what happened, why, and what to do. A flag accompanies the message: it says whether the store refused the
request or was unreachable.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from concertina_state.objects.stores import StoreKind

NO_HOLDER = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
"""Texts in errors that mean that a bucket or container does not exist."""
NOT_ALLOWED = ("Permission denied", "Read-only file system")
"""Texts in errors of the file system that mean that a file or folder is not writable."""
DENIED = ("401 Unauthorized", "403 Forbidden", "<Code>ExpiredToken<", "<Code>InvalidToken<")
SHORT = ("416 ", "Requested range was invalid")
"""Texts in errors that mean that an object ends before the requested range."""
NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal")
"""Addresses of metadata servers, from which a client requests credentials if no other credentials are configured."""
IDENTITY = ("sts.amazonaws.com/doc", "Failed to read token file", "Error performing token request")
"""Texts in errors that mean that an identity's token was not exchanged for credentials."""
UNREACHABLE = ("error sending request", "onnect", "dns error", "timed out")
CUT_OFF = ("error sending request", "request or response body error")
OPEN = "open"
"""Name of the action of opening a store, in messages.

Opening a store sends no request, so an error is caused by the settings.
"""
MOST = 300
"""Maximum length, in characters, of the store's own message within a message."""


class StoreMessage(NamedTuple):
    message: str
    refused: bool
    """True if the store refused the request, or no request could be sent. In both cases, a retry is unlikely to help
    soon."""


@dataclasses.dataclass(frozen=True)
class RefusalRule:
    """Rule that selects the error message for a refused request.

    A rule applies if the text of the store's error contains one of the rule's `signs`. The first rule that applies is
    used.
    """

    signs: tuple[str, ...]
    message: str


CLOUD = (
    RefusalRule(
        NO_HOLDER, "The {kind.holder} {holder} does not exist at {where}: create it, or correct the URI {uri}."
    ),
    RefusalRule(
        ("Received redirect without LOCATION", "PermanentRedirect", "AuthorizationHeaderMalformed"),
        "{where} has the {kind.holder} {holder} in another region: set {kind.region} to that region ({doing}, {uri}).",
    ),
    RefusalRule(
        ("InvalidCertificate", "invalid peer certificate"),
        "{where} has a certificate that is not trusted here ({doing}, {uri}): set AWS_CA_BUNDLE or "
        "SSL_CERT_FILE to the PEM file of its CA.",
    ),
    RefusalRule(
        ("501 Not Implemented", "<Code>NotImplemented<"),
        "{where} does not support conditional writes ({doing}, {uri}): use a store that does.",
    ),
    RefusalRule(
        NO_CREDENTIALS,
        "No credentials for {uri} were found ({doing}): set {kind.keys} (for a job: in the Secret that "
        "checkpoint.secretName names), or give the pod's service account a cloud identity.",
    ),
)
TOKEN = "The identity of this process was refused for {uri} ({doing}): {reason}. Check {identity}."
REFUSED = "{where} refused the credentials for {uri} ({doing}{code}): {remedy}."
SETTINGS = (
    "The settings for {uri} can't be used: {reason}. Correct {kind.keys}, or the variables of the endpoint or CA."
)
AWAY = "{where} can't be reached for {uri} ({doing}): check the endpoint and the network."
ELSE = "Could not {doing} below {uri}: {reason}."


def of_cloud(uri: str, kind: StoreKind, holder: str, doing: str, error: Exception) -> StoreMessage:
    """Return the message for users about an error of the cloud store behind a URI.

    Args:
        uri: URI of the object or folder.
        kind: Kind of the store, such as S3.
        holder: Bucket or container in the URI.
        doing: What was attempted.
        error: Error that obstore raised.
    """
    text = str(error)
    identity = kind.identity()
    remedy = f"let {identity.who} read and write it" if identity.who else _KEYS
    code = re.search(r"<Code>(\w+)</Code>", text)
    away = "the token service" if "performing POST REDACTED" in text and identity.who else kind.endpoint()
    facts = {
        "uri": uri, "kind": kind, "holder": holder, "doing": doing.strip(), "reason": _reason(text), "where": away,
        "identity": identity.check, "code": f"; {code[1]}" if code else "",
    }  # fmt: skip
    for rule in CLOUD:
        if _any(rule.signs, text):
            return StoreMessage(rule.message.format(**facts), True)
    if _any(IDENTITY, text):
        return StoreMessage(TOKEN.format(**facts), not cut_off(error))
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or _any(DENIED, text):
        return StoreMessage(REFUSED.format(**facts, remedy=remedy.format(**facts)), True)
    if doing == OPEN:
        return StoreMessage(SETTINGS.format(**facts), True)
    return StoreMessage((AWAY if _any(UNREACHABLE, text) else ELSE).format(**facts), False)


_KEYS = (
    "set {kind.keys} to credentials that can read and write it (for a job: in the Secret that "
    "checkpoint.secretName names)"
)


def of_files(uri: str, doing: str, error: Exception) -> StoreMessage:
    """Return the message for an error of the local file system."""
    text = str(error)
    if "No space left" in text:
        return StoreMessage(
            f"There is no room left for {uri} ({doing.strip()}): free space, or correct the URI.", False
        )
    if isinstance(error, PermissionError) or _any(NOT_ALLOWED, text):
        message = f"This user can't write {uri} ({doing.strip()}): correct its permissions or the URI."
        return StoreMessage(message, True)
    if isinstance(error, FileNotFoundError):
        return StoreMessage(ELSE.format(doing=doing.strip(), uri=uri, reason="it does not exist"), False)
    return StoreMessage(ELSE.format(doing=doing.strip(), uri=uri, reason=_reason(text)), False)


def is_missing(error: Exception) -> bool:
    """Return whether the error means that an object does not exist, or is too short."""
    text = str(error)
    return _any(SHORT, text) or (isinstance(error, FileNotFoundError) and not _any(NO_HOLDER, text))


def cut_off(error: Exception) -> bool:
    """Return whether the error means that a connection ended before the answer was complete."""
    return _any(CUT_OFF, str(error))


def _any(signs: tuple[str, ...], text: str) -> bool:
    return any(sign in text for sign in signs)


def _reason(text: str) -> str:
    """Return the store's own message from the text of an error, or the first line of the text."""
    message = re.search(r"<Message>([^<]*)</Message>", text)
    line = message[1] if message else (text.splitlines() or [""])[0]
    return re.sub(r"^Generic \w+ error: ", "", line).strip(" .")[:MOST]
