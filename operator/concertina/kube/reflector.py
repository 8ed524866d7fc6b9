"""Local copy of one kind of objects: LIST in chunks, then WATCH with bookmarks, and LIST again on 410.

kopf would hold the same objects at 30 times the CPU (decision "kubernetes.aio for access, requests by hand").
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from concertina import backoff, metrics
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, Forbidden, Gone
from concertina.kube.resources import Raw, Resource, version_of

T = TypeVar("T")
Key = tuple[str, str]
"""(namespace, name)"""
log = logging.getLogger(__name__)
_GHOSTS = 4096
FIRST_SECONDS, LONGEST_SECONDS = 0.2, 1.0
"""First and longest delay in seconds before a broken watch is tried again."""
LONGEST_FORBIDDEN_SECONDS = 20.0
"""Longest delay in seconds before a watch that the API server refuses is tried again. It may refuse it for months."""


class WatchEnd(enum.StrEnum):
    """Reason why a watch ended that is started again."""

    CLOSED = "closed"
    """The API server closed it in order, as it does every few minutes."""
    GONE = "gone"
    """The resourceVersion is too old, so all objects are listed again."""
    BROKEN = "broken"
    """The watch broke, or it or its list failed."""


@dataclass(frozen=True)
class CachedObject(Generic[T]):
    """Parsed object with its identity."""

    uid: str
    version: int
    value: T


class Reflector(Generic[T]):
    """Cache of one kind of objects.

    `parse` returns what to store of an object. `changed(old, new)` is called for every difference, including deletions.
    """

    def __init__(
        self,
        client: Client,
        resource: Resource,
        parse: Callable[[Raw], T],
        changed: Callable[[T | None, T | None], None],
        namespace: str | None = None,
        labels: str = "",
    ) -> None:
        self._client = client
        self._resource = resource
        self._parse = parse
        self._changed = changed
        self._namespace = namespace
        self._labels = labels
        self._objects: dict[Key, CachedObject[T]] = {}
        self._ghosts: OrderedDict[str, None] = OrderedDict()
        self.synced = asyncio.Event()
        """Event that is set after the first LIST."""
        self.answered = asyncio.Event()
        """Event that is set with `synced`, or once the API server refuses a LIST, which may last forever."""
        self.trouble = ""
        """Message of the API server about why changes are not received, or empty while they are.

        A restarted watch is silent at first, for up to a minute, until its first bookmark.
        """

    def values(self) -> Iterator[T]:
        return (cached.value for cached in self._objects.values())

    def assume(self, obj: Raw) -> None:
        """Take an object that this operator's own write returned, so that no plan is made on an older version of it."""
        if obj["metadata"]["uid"] not in self._ghosts:
            self._put(obj)

    async def run(self) -> None:
        """Follow the API server forever, and wait until an outage is over."""
        version, failures, refusals = "", 0, 0
        metrics.begin_at_zero(metrics.WATCH_RESTARTS, [self._resource.plural], WatchEnd)
        while True:
            end = WatchEnd.CLOSED
            try:
                if not version:
                    version = await self._list()
                async for kind, obj in self._client.watch(self._resource, self._namespace, version, self._labels):
                    failures, refusals, self.trouble = 0, 0, ""
                    version = obj["metadata"]["resourceVersion"]
                    self._take(kind, obj)
            except Gone:
                version, end = "", WatchEnd.GONE
            except ApiError as error:
                end = WatchEnd.BROKEN
                log.log(logging.INFO if failures else logging.DEBUG, "watch of %s: %s", self._resource.plural, error)
                if failures:  # most broken watches can be reopened at the first try
                    self.trouble = str(error)
                if isinstance(error, Forbidden):
                    self.answered.set()
                    refusals += 1  # not failures: after an outage, an API server briefly refuses what it allows
                    seconds = backoff.seconds(refusals - 1, FIRST_SECONDS, LONGEST_FORBIDDEN_SECONDS)
                else:
                    refusals = 0
                    seconds = backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS)
                await asyncio.sleep(seconds)
                failures += 1
            metrics.WATCH_RESTARTS.labels(self._resource.plural, end).inc()

    async def _list(self) -> str:
        listed, version = set[Key](), ""
        async for page, version_of_list in self._client.pages(self._resource, self._namespace, self._labels):
            version = version_of_list
            for item in page:  # parsed before the next page: ten thousand raw pods take much memory
                listed.add(_key(item))
                self._put(item)
        for key, cached in list(self._objects.items()):
            # Objects that were created while the list was read are newer than the list.
            if key not in listed and cached.version <= int(version):
                self._drop(key, cached.uid)
        self.synced.set()
        self.answered.set()
        self.trouble = ""
        return version

    def _take(self, kind: str, obj: Raw) -> None:
        if kind in ("ADDED", "MODIFIED"):
            self._put(obj)
        elif kind == "DELETED":
            self._drop(_key(obj), obj["metadata"]["uid"])

    def _put(self, obj: Raw) -> None:
        key, version = _key(obj), version_of(obj)
        old = self._objects.get(key)
        if old and old.version >= version:
            return
        try:
            new = CachedObject(obj["metadata"]["uid"], version, self._parse(obj))
        except Exception:
            # One malformed object must not end the watch of all objects.
            log.exception("%s %s can't be read and is left out", self._resource.plural, "/".join(key))
            return
        self._objects[key] = new
        if old is None or old.value != new.value:
            self._changed(old.value if old else None, new.value)

    def _drop(self, key: Key, uid: str) -> None:
        self._ghosts[uid] = None
        if len(self._ghosts) > _GHOSTS:
            self._ghosts.popitem(last=False)
        old = self._objects.get(key)
        if old and old.uid == uid:
            del self._objects[key]
            self._changed(old.value, None)


def _key(obj: Raw) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
