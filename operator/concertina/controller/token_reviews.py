"""Requests to the API server whether a client's token allows it to read the operator's metrics.

A check consists of a TokenReview and a SubjectAccessReview of `get` on the URL /metrics, as in controller-runtime.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from concertina.kube.client import Client
from concertina.kube.errors import Unreachable
from concertina.kube.resources import ACCESS_REVIEWS, TOKEN_REVIEWS, Raw

ALLOWED_SECONDS, REFUSED_SECONDS = 60.0, 10.0
"""Seconds for which a positive and a negative result of a token review are cached."""
REMEMBERED = 256
"""Largest number of cached results of each kind (positive and negative).

Negative results are stored separately, so that random tokens do not evict positive results.
"""
AT_ONCE, WAITING = 2, 32
"""Largest number of token reviews at a time, and of callers that wait for a review.

This limits the load that unknown clients can cause on the API server.
"""
PATH = "/metrics"


class TokenVerdict(enum.Enum):
    """Result of the review of a token: whether it may read metrics."""

    ALLOWED = enum.auto()
    UNKNOWN_TOKEN = enum.auto()
    FORBIDDEN = enum.auto()
    """The token is valid, but its account may not read metrics."""


@dataclass(frozen=True)
class _Answer:
    verdict: TokenVerdict
    until: float


class TokenReviews:
    """Token reviews by the API server, with a cache of the results. Only hashes of the tokens are stored."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._allowed: OrderedDict[bytes, _Answer] = OrderedDict()
        self._refused: OrderedDict[bytes, _Answer] = OrderedDict()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def verdict(self, token: str) -> TokenVerdict:
        """Return whether the token allows its owner to read metrics.

        Raises:
            ApiError: When the API server does not answer.
            Unreachable: When too many callers already wait for a review.
        """
        key = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        if (cached := self._cached(key)) is not None:
            return cached
        if self._waiting >= WAITING:
            raise Unreachable(429, "TooManyRequests", "too many unknown tokens at once")
        self._waiting += 1
        try:
            async with self._turns:
                if (cached := self._cached(key)) is not None:  # another request has had the same token reviewed
                    return cached
                verdict = await self._reviewed(token)
        finally:
            self._waiting -= 1
        self._remember(key, verdict)
        return verdict

    def _cached(self, key: bytes) -> TokenVerdict | None:
        answer = self._allowed.get(key) or self._refused.get(key)
        return answer.verdict if answer is not None and self._clock() < answer.until else None

    def _remember(self, key: bytes, verdict: TokenVerdict) -> None:
        self._allowed.pop(key, None)
        self._refused.pop(key, None)
        allowed = verdict is TokenVerdict.ALLOWED
        answers = self._allowed if allowed else self._refused
        answers[key] = _Answer(verdict, self._clock() + (ALLOWED_SECONDS if allowed else REFUSED_SECONDS))
        if len(answers) > REMEMBERED:
            answers.popitem(last=False)

    async def _reviewed(self, token: str) -> TokenVerdict:
        review: Raw = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        token_status: Raw = (await self._client.create(TOKEN_REVIEWS, None, review)).get("status") or {}
        if token_status.get("authenticated") is not True:
            return TokenVerdict.UNKNOWN_TOKEN
        user: Raw = token_status.get("user") or {}
        access_request: Raw = {"nonResourceAttributes": {"path": PATH, "verb": "get"}, "user": user.get("username", "")}
        access_request |= {name: user[name] for name in ("uid", "groups", "extra") if user.get(name)}
        access: Raw = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": access_request}
        access_status: Raw = (await self._client.create(ACCESS_REVIEWS, None, access)).get("status") or {}
        return TokenVerdict.ALLOWED if access_status.get("allowed") is True else TokenVerdict.FORBIDDEN
