"""A thin client of raw dicts. Typed objects cost 5 to 10 times the CPU on lists of thousands
(decision "kubernetes.aio for access, requests by hand").

Every request is tried again on 429, 5xx and lost connections, with back-off and jitter, until `give_up_after` seconds
have passed; then Unreachable is raised. What is not tried again is raised as the exception of errors.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from concertina import backoff, metrics
from concertina.kube import deep_json
from concertina.kube.access import Access
from concertina.kube.errors import ApiError, NotFound, Unauthorized, Unreachable, from_status
from concertina.kube.resources import PODS, SERVER_VERSION, Raw, Resource

REQUEST_SECONDS = 15.0
WATCH_SILENCE_SECONDS = 75.0
"""A watch gets a bookmark at least every minute; one that is silent for longer is dead."""
FIRST_SECONDS, LONGEST_SECONDS = 0.05, 3.0
"""Until a request is tried again; an API server that has just started asks for 30, and is there a second later."""
_LOST = (aiohttp.ClientError, TimeoutError)
"""Connections that break, and answers that are none: a proxy's refusal to connect, redirects in a circle, no HTTP."""
_PATCHES: dict[type, str] = {list: "application/json-patch+json", dict: "application/merge-patch+json"}

DRY_RUN = {"dryRun": "All"}

log = logging.getLogger(__name__)
MOST_MESSAGE = 128 * 1024 * 1024
"""Bytes of one message of a websocket."""
FIRST_LIMIT, MOST_LIMIT = 32, 500
"""Objects of a page: of the first one, and of any."""
PAGE_BYTES, MOST_PAGE_BYTES = 1 << 20, 2 << 20
"""The size that pages come to have, and the one at which a page is given up. Decoded, a page takes up to 25 times as
much memory."""
READ_AHEAD = 1024 * 1024
"""Bytes of a stream that may wait to be read here: the API server ends a watch whose client is slow, and the pods of
five jobs that start in a second are a megabyte."""
T = TypeVar("T")


class _PageTooLarge(Exception):
    pass


async def once_reachable(what: str, ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` returns, as soon as the API server can be reached, however long that takes: who has nothing to do
    without it waits, instead of ending and being started again, ever more slowly. Other errors are raised."""
    failures = 0
    while True:
        try:
            return await ask()
        except Unreachable as error:
            level = logging.INFO if failures else logging.WARNING
            log.log(level, "%s: %s; asked again until the API server answers", what, error)
            await asyncio.sleep(backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS))
            failures += 1


class Client:
    """Requests to one API server; an async context manager."""

    def __init__(self, access: Access, give_up_after: float = 30.0, connections: int = 64) -> None:
        self.access = access
        self.give_up_after = give_up_after
        self.requests = 0
        """Sent so far, watches and repetitions included."""
        self._host = urllib.parse.urlsplit(access.server).netloc.rpartition("@")[2]
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, ssl=self.access.ssl_context())
        self._session = aiohttp.ClientSession(
            connector=connector, skip_auto_headers=["User-Agent"], read_bufsize=READ_AHEAD
        )
        self._slots = asyncio.Semaphore(self._connections)  # of requests; watches and logs stay open beside them
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    # --- objects ---------------------------------------------------------------------------------------------------

    async def get(self, resource: Resource, namespace: str | None, name: str, subresource: str = "") -> Raw:
        return await self._json("GET", resource, resource.path(namespace, name, subresource))

    async def list_all(
        self,
        resource: Resource,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        chunk: int = MOST_LIMIT,
    ) -> tuple[list[Raw], str]:
        """All objects, and the resourceVersion of the list."""
        items, version = list[Raw](), ""
        async for some, at in self.pages(resource, namespace, labels, fields, chunk):
            items += some
            version = at
        return items, version

    async def pages(
        self,
        resource: Resource,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        chunk: int = MOST_LIMIT,
    ) -> AsyncIterator[tuple[list[Raw], str]]:
        """Yield all objects, at most `chunk` at a time, each time with the resourceVersion of the list.

        A page is bounded by its bytes, whatever the sizes of objects: the number of objects that is asked for follows
        the size of the pages before (decision "Pages of a list are bounded by bytes"). A page is emptied before the
        next one is asked for. Raises Gone where the list took longer than the API server keeps it."""
        params = _selectors(labels, fields)
        limit = min(FIRST_LIMIT, chunk)
        while True:
            params["limit"] = str(limit)
            try:
                page, size = await self._page(resource, resource.path(namespace), params, single=limit == 1)
            except _PageTooLarge:
                limit = max(1, limit // 8)
                continue
            items, metadata = page.pop("items", None) or [], page["metadata"]
            yield items, str(metadata["resourceVersion"])
            items.clear()
            if not metadata.get("continue"):
                return
            params["continue"] = metadata["continue"]
            limit = max(1, min(chunk, 2 * limit, limit * PAGE_BYTES // size))

    async def create(
        self, resource: Resource, namespace: str | None, body: Raw, strict: bool = False, dry_run: bool = False
    ) -> Raw:
        """`strict`: an unknown or doubled field is an error, as with kubectl. `dry_run`: nothing is stored."""
        params = ({"fieldValidation": "Strict"} if strict else {}) | (DRY_RUN if dry_run else {})
        return await self._json("POST", resource, resource.path(namespace), params=params, body=body)

    async def create_below(self, resource: Resource, namespace: str, name: str, subresource: str, body: Raw) -> Raw:
        """What is asked of an object by a POST to its subresource, as an eviction of a pod."""
        return await self._json("POST", resource, resource.path(namespace, name, subresource), body=body)

    async def replace(self, resource: Resource, namespace: str | None, name: str, body: Raw) -> Raw:
        return await self._json("PUT", resource, resource.path(namespace, name), body=body)

    async def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        patch: list[Raw] | Raw,
        subresource: str = "",
        strict: bool = False,
    ) -> Raw:
        """A list is a JSON patch, a dict a merge patch."""
        params = {"fieldValidation": "Strict"} if strict else {}
        path = resource.path(namespace, name, subresource)
        return await self._json("PATCH", resource, path, params=params, body=patch, content=_PATCHES[type(patch)])

    async def server_version(self) -> tuple[int, int]:
        """Return the API server's version of Kubernetes, such as (1, 36).

        Raises:
            ApiError: The API server refuses, or says no version that can be read.
        """
        answer = await self._json("GET", SERVER_VERSION, "/version")
        version = re.match(r"(\d{1,4})\.(\d{1,4})", f"{answer.get('major')}.{answer.get('minor')}")  # some say 36+
        if version is None:
            raise ApiError(200, "NoVersion", "the API server does not say its version")
        return int(version[1]), int(version[2])

    async def apply(self, resource: Resource, namespace: str, name: str, body: Raw, dry_run: bool = False) -> Raw:
        """Server-side apply of what a person wrote: as `kubectl apply --server-side --force-conflicts`."""
        params = {"fieldManager": "concertina", "force": "true", "fieldValidation": "Strict"}
        params |= DRY_RUN if dry_run else {}
        path, content = resource.path(namespace, name), "application/apply-patch+yaml"
        return await self._json("PATCH", resource, path, params=params, body=body, content=content)

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int) -> Raw:
        return await self.patch(resource, namespace, name, {"spec": {"replicas": replicas}}, subresource="scale")

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        uid: str = "",
        grace: int | None = None,
        propagation: str = "",
    ) -> Raw | None:
        """The object as it is while it ends, or None where it is gone already. `uid`: only if it is this very one."""
        options: Raw = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if propagation:
            options["propagationPolicy"] = propagation
        try:
            answer = await self._json("DELETE", resource, resource.path(namespace, name), body=options)
        except NotFound:
            return None
        return None if answer.get("kind") == "Status" else answer

    # --- streams ---------------------------------------------------------------------------------------------------

    async def watch(
        self, resource: Resource, namespace: str | None, version: str, labels: str = "", fields: str = ""
    ) -> AsyncIterator[tuple[str, Raw]]:
        """(ADDED, MODIFIED, DELETED or BOOKMARK, object) from `version` on, until the server or the network ends it.

        Raises Gone where `version` is too old, Unreachable where the stream broke or can't be had now."""
        params = _selectors(labels, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(random.randint(240, 360)),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=WATCH_SILENCE_SECONDS)
        async for line in self._lines(resource, resource.path(namespace), params, timeout):
            kind, obj = _event(line)
            if kind == "ERROR":
                raise _of_stream(int(obj.get("code") or 500), json.dumps(obj).encode())
            yield kind, obj

    async def logs(
        self,
        namespace: str,
        pod: str,
        container: str = "",
        follow: bool = False,
        tail: int | None = None,
        since: str = "",
        limit_bytes: int | None = None,
        timestamps: bool = False,
        previous: bool = False,
    ) -> AsyncIterator[str]:
        """The lines of a container, as they come with `follow`; `since`: an RFC 3339 time in whole seconds;
        `timestamps`: each after its time; `previous`: of its last run, where it was started again."""
        params = {"follow": "true"} if follow else {}
        if container:
            params["container"] = container
        if tail is not None:
            params["tailLines"] = str(tail)
        if since:
            params["sinceTime"] = since
        if timestamps:
            params["timestamps"] = "true"
        if previous:
            params["previous"] = "true"
        if limit_bytes is not None:
            params["limitBytes"] = str(limit_bytes)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS)
        async for line in self._lines(PODS, PODS.path(namespace, pod, "log"), params, timeout):
            yield line.decode("utf-8", "replace")

    @asynccontextmanager
    async def websocket(
        self, path: str, params: list[tuple[str, str]], protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A websocket to the API server. Raises the exceptions of errors.py where it is refused or breaks."""
        assert self._session is not None, "use the client as an async context manager"
        headers = {"User-Agent": "concertina"}
        if authorization := await self.access.authorization():
            headers["Authorization"] = authorization
        connecting = self._session.ws_connect(
            self.access.server + path,
            params=params,
            protocols=(protocol,),
            headers=headers,
            proxy=self.access.proxy,
            server_hostname=self.access.server_name,
            max_msg_size=MOST_MESSAGE,
        )
        try:
            async with connecting as socket:
                yield socket
        except aiohttp.WSServerHandshakeError as error:
            raise from_status(error.status, f"{path}: {error.message}".encode()) from error
        except _LOST as error:
            raise Unreachable(0, "StreamLost", f"{path} broke: {_why(error)}") from error

    async def _lines(
        self, resource: Resource, path: str, params: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[bytes]:
        try:
            response = await self._send("GET", resource, path, params, None, timeout)
            if response.status == 401:  # credentials run out while streams are all that is asked for
                async with response:
                    await self.access.renew(response.request_info.headers.get("Authorization", ""))
                response = await self._send("GET", resource, path, params, None, timeout)
            async with response:
                if response.status >= 400:
                    raise _of_stream(response.status, await response.read())
                rest = b""
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield line
                if rest:
                    yield rest
        except _LOST as error:
            raise Unreachable(0, "StreamLost", f"the stream of {path} broke: {_why(error)}") from error

    # --- one request -----------------------------------------------------------------------------------------------

    async def _json(
        self,
        method: str,
        resource: Resource,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = "application/json",
    ) -> Raw:
        """What is asked of `resource` at `path`, again and again, until there is an answer to go by."""
        with metrics.request_seconds(method, self._host, resource.plural).time():
            return (await self._answer(method, resource, path, params or {}, body, content))[0]

    async def _page(self, resource: Resource, path: str, params: Mapping[str, str], single: bool) -> tuple[Raw, int]:
        """A page of a list, and its bytes. Raises _PageTooLarge, but for a page of a `single` object."""
        with metrics.request_seconds("GET", self._host, resource.plural).time():
            return await self._answer("GET", resource, path, params, most_bytes=None if single else MOST_PAGE_BYTES)

    async def _answer(
        self,
        method: str,
        resource: Resource,
        path: str,
        params: Mapping[str, str],
        body: Any = None,
        content: str = "application/json",
        most_bytes: int | None = None,
    ) -> tuple[Raw, int]:
        """The answer, and its bytes. Raises _PageTooLarge as soon as it has more than `most_bytes`."""
        data = None if body is None else deep_json.dumps(body)
        deadline = time.monotonic() + self.give_up_after
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        renewed, attempt = False, 0
        while True:
            wait = backoff.seconds(attempt, FIRST_SECONDS, LONGEST_SECONDS)
            attempt += 1
            try:
                async with self._slots:
                    response = await self._send(method, resource, path, params, data, timeout, content)
                    async with response:
                        answer = await _read(response, most_bytes)
                if response.status < 400:
                    return deep_json.loads(answer), len(answer)
                error: ApiError = from_status(response.status, answer)
                if isinstance(error, Unauthorized) and not renewed:
                    renewed = True
                    await self.access.renew(response.request_info.headers.get("Authorization", ""))
                    continue
                if not _passes(response.status):
                    raise error
                wait = max(wait, min(LONGEST_SECONDS, _seconds(response.headers.get("Retry-After", ""))))
            except _LOST as lost:
                error = Unreachable(0, "Unreachable", f"{self.access.server} can't be reached: {_why(lost)}")
            except ValueError as other:  # a proxy's page, perhaps
                error = Unreachable(0, "Unreachable", f"{self.access.server} answered what is no JSON: {other}")
            if time.monotonic() + wait >= deadline:
                if isinstance(error, Unreachable):
                    raise error  # which may say more
                raise Unreachable(error.status, error.reason, error.message) from error
            await asyncio.sleep(wait)

    async def _send(
        self,
        method: str,
        resource: Resource,
        path: str,
        params: Mapping[str, str],
        data: bytes | None,
        timeout: aiohttp.ClientTimeout,
        content: str = "application/json",
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "use the client as an async context manager"
        self.requests += 1
        headers = {"Accept": "application/json", "User-Agent": "concertina"}
        if data is not None:
            headers["Content-Type"] = content
        if authorization := await self.access.authorization():
            headers["Authorization"] = authorization
        access = self.access
        code = metrics.NO_ANSWER
        try:
            response = await self._session.request(
                method,
                access.server + path,
                params=params,
                data=data,
                headers=headers,
                timeout=timeout,
                proxy=access.proxy,
                server_hostname=access.server_name,
            )
            code = str(response.status)
        finally:
            metrics.requests(code, method, self._host, resource.plural).inc()
        return response


async def _read(response: aiohttp.ClientResponse, most_bytes: int | None) -> bytes:
    """Raises _PageTooLarge, and closes the connection then, so that the rest is not sent."""
    if most_bytes is None:
        return await response.read()
    parts, size = list[bytes](), 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most_bytes:
            response.close()
            raise _PageTooLarge
        parts.append(part)
    return b"".join(parts)


def _why(lost: Exception) -> str:
    """What was lost, in words: aiohttp's own of an answer have the proxy's address with its password in them."""
    if isinstance(lost, aiohttp.TooManyRedirects):
        return "it redirects in a circle"
    if isinstance(lost, aiohttp.ClientHttpProxyError):
        return f"its proxy answered {lost.status} {lost.message}"
    if isinstance(lost, aiohttp.ClientResponseError):
        return f"its answer can't be read: {' '.join(lost.message.split()).rstrip(' ^')}"
    return str(lost) or ("timed out" if isinstance(lost, TimeoutError) else type(lost).__name__)


def _passes(status: int) -> bool:
    """Whether another try may do."""
    return status == 429 or status >= 500


def _of_stream(status: int, body: bytes) -> ApiError:
    """Why there is none. It is not tried again here: whoever follows it knows from where on."""
    error = from_status(status, body)
    return Unreachable(error.status, error.reason, error.message) if _passes(status) else error


def _event(line: bytes) -> tuple[str, Raw]:
    """Of a watch. Raises Unreachable where it is none: the stream was cut off within it."""
    try:
        event = deep_json.loads(line)
        kind, obj = event["type"], event["object"]
        if not isinstance(kind, str) or not isinstance(obj, dict):
            raise TypeError("no event")
    except (ValueError, KeyError, TypeError) as error:
        raise Unreachable(0, "StreamLost", f"a watch said what is no event ({error}): {line[:80]!r}") from error
    return kind, obj


def _seconds(text: str) -> float:
    """Of Retry-After, which may be a date too."""
    return float(text) if text.isdecimal() else 0.0


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
