"""Errors of stores, and whether a store refuses a request or is only unreachable."""

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError, UnauthenticatedError

from concertina_state.objects import messages
from concertina_state.objects.stores import KINDS

STATUS = "Error performing GET http://s3/b/k in 2ms - Server returned non-2xx status code: "
AWAY = "Error performing GET http://s3/b/k in 3s, after 9 retries - HTTP error: error sending request"
TOKEN = "Error performing POST REDACTED in 3s - Error performing token request: "
SAID = [
    (PermissionDeniedError(f"{STATUS}403 Forbidden: <Error><Code>AccessDenied</Code></Error>"), True),
    (UnauthenticatedError(f"{STATUS}401 Unauthorized: "), True),
    (GenericError(f"{STATUS}400 Bad Request: <Error><Code>ExpiredToken</Code></Error>"), True),
    (FileNotFoundError(f"{STATUS}404 Not Found: <Error><Code>NoSuchBucket</Code></Error>"), True),
    (GenericError(f"{STATUS}301 Moved Permanently: <Error><Code>PermanentRedirect</Code></Error>"), True),
    (GenericError("HTTP error: error sending request: invalid peer certificate: UnknownIssuer"), True),
    (GenericError("Error performing PUT http://169.254.169.254/latest: error sending request"), True),
    (GenericError(f"{TOKEN}the role does not trust this account"), True),
    (GenericError(f"{TOKEN}error sending request"), False),
    (GenericError(AWAY), False),
    (GenericError(f"{STATUS}503 Service Unavailable: <Error><Code>SlowDown</Code></Error>"), False),
    (GenericError(f"{STATUS}500 Internal Server Error: "), False),
    (GenericError("HTTP error: request or response body error"), False),
]


@pytest.mark.parametrize(("error", "refused"), SAID, ids=[str(error)[-60:] for error, _ in SAID])
def test_a_refusal_is_told_from_a_store_that_is_away(error, refused):
    assert messages.of_cloud("s3://b/x", KINDS["s3"], "b", "read k", error).refused is refused


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        (FileNotFoundError(f"{STATUS}404 Not Found: <Error><Code>NoSuchKey</Code></Error>"), True),
        (GenericError(f"{STATUS}416 Range Not Satisfiable: "), True),
        (FileNotFoundError(f"{STATUS}404 Not Found: <Error><Code>NoSuchBucket</Code></Error>"), False),
        (GenericError(AWAY), False),
    ],
)
def test_an_object_that_is_not_there_is_told_from_a_bucket_that_is_not(error, missing):
    assert messages.is_missing(error) is missing
