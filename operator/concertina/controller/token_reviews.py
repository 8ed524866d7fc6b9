"""Ask the API server whether a token may read the operator's metrics.

A TokenReview, then a SubjectAccessReview of `get` on the URL /metrics, as controller-runtime does it.
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
"""How long an answer of the API server holds."""
REMEMBERED = 256
"""Answers of each kind. Refusals are kept apart: random tokens must not push out those that are allowed."""
AT_ONCE, WAITING = 2, 32
"""Reviews under way, and callers that may wait for one, so that strangers put little load on the API server."""
PATH = "/metrics"


class TokenVerdict(enum.Enum):
    """The outcome for a request that shows a token."""

    ALLOWED = enum.auto()
    UNKNOWN_TOKEN = enum.auto()
    FORBIDDEN = enum.auto()
    """The token is good, and its account may not read metrics."""


@dataclass(frozen=True)
class _Answer:
    verdict: TokenVerdict
    until: float


class TokenReviews:
    """Asks the API server about each token once in a while. Tokens are kept as hashes only."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._allowed: OrderedDict[bytes, _Answer] = OrderedDict()
        self._refused: OrderedDict[bytes, _Answer] = OrderedDict()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def verdict(self, token: str) -> TokenVerdict:
        """Raises ApiError where the API server can't say, or is asked about too many tokens already."""
        key = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        if (known := self._known(key)) is not None:
            return known
        if self._waiting >= WAITING:
            raise Unreachable(429, "TooManyRequests", "too many unknown tokens are shown at once")
        self._waiting += 1
        try:
            async with self._turns:
                if (known := self._known(key)) is not None:  # another request with the same token was first
                    return known
                verdict = await self._reviewed(token)
        finally:
            self._waiting -= 1
        self._remember(key, verdict)
        return verdict

    def _known(self, key: bytes) -> TokenVerdict | None:
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
        answer: Raw = (await self._client.create(TOKEN_REVIEWS, None, review)).get("status") or {}
        if answer.get("authenticated") is not True:
            return TokenVerdict.UNKNOWN_TOKEN
        user: Raw = answer.get("user") or {}
        asked: Raw = {"nonResourceAttributes": {"path": PATH, "verb": "get"}, "user": user.get("username", "")}
        asked |= {name: user[name] for name in ("uid", "groups", "extra") if user.get(name)}
        access: Raw = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": asked}
        allowed: Raw = (await self._client.create(ACCESS_REVIEWS, None, access)).get("status") or {}
        return TokenVerdict.ALLOWED if allowed.get("allowed") is True else TokenVerdict.FORBIDDEN
