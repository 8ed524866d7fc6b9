"""Thin client for the API server. Objects are plain dicts.

Typed objects would cost 5 to 10 times the CPU for lists of thousands (decision "Requests to the API server through
aiohttp"). The client retries a request on status 429 and 5xx and on lost connections, with backoff and jitter, until
`give_up_after` seconds have passed. Then it raises Unreachable. Errors that are not retried are raised as exceptions of
errors.py.
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
from concertina.kube.resources import API_DISCOVERY, PODS, SERVER_VERSION, Raw, Resource

REQUEST_SECONDS = 15.0
WATCH_SILENCE_SECONDS = 75.0
"""Seconds without data after which the client treats a watch as broken.

The API server sends a bookmark at least every minute.
"""
FIRST_SECONDS, LONGEST_SECONDS = 0.05, 3.0
"""Shortest and longest delay in seconds before a request is retried.

The longest delay also caps the delay that the API server requests. A server that has just started requests 30 s, but is
usually ready a second later.
"""
_LOST = (aiohttp.ClientError, TimeoutError)
"""Exceptions for broken connections and for responses that are not valid HTTP.

They include a proxy that refuses to connect, and a redirect loop.
"""
_PATCHES: dict[type, str] = {list: "application/json-patch+json", dict: "application/merge-patch+json"}

DRY_RUN = {"dryRun": "All"}

log = logging.getLogger(__name__)
MOST_MESSAGE = 128 * 1024 * 1024
"""Maximum size in bytes of one websocket message."""
FIRST_LIMIT, MOST_LIMIT = 32, 500
"""Number of objects in the first page of a list, and the largest number in any page."""
PAGE_BYTES, MOST_PAGE_BYTES = 1 << 20, 2 << 20
"""Target size of a page of a list in bytes, and the size at which the client stops reading a page.

The client then requests a smaller page. A decoded page takes up to 25 times as much memory.
"""
READ_AHEAD = 1024 * 1024
"""Size in bytes of the buffer for a streamed response, such as a watch.

The API server ends a watch if the client reads slowly. The pods of five jobs that start in the same second take a
megabyte.
"""
T = TypeVar("T")


class _PageTooLarge(Exception):
    pass


async def once_reachable(purpose: str, ask: Callable[[], Awaitable[T]]) -> T:
    """Call `ask`, which sends a request, and repeat the call while the API server is unreachable. Return the result.

    Use this function if the process can do nothing without the result. If the process ended instead, the kubelet would
    restart it with increasing delays. Errors other than Unreachable are raised.
    """
    failures = 0
    while True:
        try:
            return await ask()
        except Unreachable as error:
            level = logging.INFO if failures else logging.WARNING
            log.log(level, "%s: %s; retrying until the API server answers", purpose, error)
            await asyncio.sleep(backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS))
            failures += 1


class Client:
    """Client for one API server. Use it as an async context manager."""

    def __init__(self, access: Access, give_up_after: float = 30.0, connections: int = 64) -> None:
        self.access = access
        self.give_up_after = give_up_after
        self.requests = 0
        """Number of requests sent so far, including watches and retries."""
        self._host = urllib.parse.urlsplit(access.server).netloc.rpartition("@")[2]
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, ssl=self.access.ssl_context())
        self._session = aiohttp.ClientSession(
            connector=connector, skip_auto_headers=["User-Agent"], read_bufsize=READ_AHEAD
        )
        self._slots = asyncio.Semaphore(self._connections)  # for requests only: watches and logs do not count
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
        """Return all objects of a kind, and the resourceVersion of the list."""
        items, version = list[Raw](), ""
        async for page, list_version in self.pages(resource, namespace, labels, fields, chunk):
            items += page
            version = list_version
        return items, version

    async def pages(
        self,
        resource: Resource,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        chunk: int = MOST_LIMIT,
    ) -> AsyncIterator[tuple[list[Raw], str]]:
        """Yield all objects of a kind in pages of at most `chunk` objects, with the resourceVersion of the list.

        The size of a page in bytes is limited too: the client chooses the number of objects for the next page by the
        size of earlier pages (decision "Pages of a list are bounded by bytes"). To save memory, each yielded list is
        cleared before the next page is requested.

        Raises:
            Gone: When the iteration took longer than the API server keeps the list.
        """
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
        """Create an object, and return it as the API server stored it.

        Args:
            resource: Kind of the object.
            namespace: Namespace of the object.
            body: Manifest of the object.
            strict: Whether unknown and duplicate fields are errors, as with kubectl.
            dry_run: Whether the API server only validates the object and stores nothing.
        """
        params = ({"fieldValidation": "Strict"} if strict else {}) | (DRY_RUN if dry_run else {})
        return await self._json("POST", resource, resource.path(namespace), params=params, body=body)

    async def create_below(self, resource: Resource, namespace: str, name: str, subresource: str, body: Raw) -> Raw:
        """Send a POST request to a subresource of an object, such as `eviction` of a pod."""
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
        """Patch an object and return it. A list is sent as a JSON patch, and a dict as a merge patch."""
        params = {"fieldValidation": "Strict"} if strict else {}
        path = resource.path(namespace, name, subresource)
        return await self._json("PATCH", resource, path, params=params, body=patch, content=_PATCHES[type(patch)])

    async def server_version(self) -> tuple[int, int]:
        """Return the API server's Kubernetes version, such as (1, 36).

        Raises:
            ApiError: When the API server refuses the request or returns no readable version.
        """
        answer = await self._json("GET", SERVER_VERSION, "/version")
        version = re.match(r"(\d{1,4})\.(\d{1,4})", f"{answer.get('major')}.{answer.get('minor')}")  # some say 36+
        if version is None:
            raise ApiError(200, "NoVersion", "the API server does not say its version")
        return int(version[1]), int(version[2])

    async def api_versions(self) -> frozenset[str]:
        """Return all API versions that the API server serves, in the form group/version.

        The core API v1 is left out.
        """
        answer = await self._json("GET", API_DISCOVERY, "/apis")
        groups: list[Raw] = answer.get("groups") or []
        return frozenset(version["groupVersion"] for group in groups for version in group.get("versions") or ())

    async def resources_of(self, api_version: str) -> frozenset[str]:
        """Return the plural names of the resources that the API server serves in an API version (group/version)."""
        answer = await self._json("GET", API_DISCOVERY, f"/apis/{api_version}")
        return frozenset(resource["name"] for resource in answer.get("resources") or ())

    async def apply(self, resource: Resource, namespace: str, name: str, body: Raw, dry_run: bool = False) -> Raw:
        """Apply a user's manifest with server-side apply, as `kubectl apply --server-side --force-conflicts` does."""
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
        """Delete an object. Return the object if its deletion is still in progress, or None if it no longer exists.

        Args:
            resource: Kind of the object.
            namespace: Namespace of the object.
            name: Name of the object.
            uid: Uid that the object must have; empty for any uid.
            grace: Grace period in seconds; None for the default.
            propagation: Propagation policy; empty for the default.
        """
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
        """Yield watch events for changes after the resourceVersion `version`, until the watch ends.

        An event consists of its type (ADDED, MODIFIED, DELETED or BOOKMARK) and the object.

        Raises:
            Gone: When `version` is too old.
            Unreachable: When the stream breaks or cannot be opened.
            ApiError: When the API server refuses the watch.
        """
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
        """Yield the lines of a container's log.

        Args:
            namespace: Namespace of the pod.
            pod: Name of the pod.
            container: Name of the container; empty if the pod has only one.
            follow: Whether to wait for further lines.
            tail: Number of existing lines to yield, counted from the end of the log; None for all lines.
            since: Time of the earliest line to yield, in RFC 3339 format with whole seconds.
            limit_bytes: Largest number of bytes to read; None for no limit.
            timestamps: Whether the API server puts the time in front of each line.
            previous: Whether to read the log of the container's previous run, before its last restart.
        """
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
        """Open a websocket to the API server.

        Raises:
            ApiError: When the API server refuses the websocket.
            Unreachable: When the connection breaks.
        """
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
            # A handshake has no body. Without this one, status 404 would mean that the API does not exist.
            body = json.dumps({"message": f"{path} was refused with HTTP status {error.status}"})
            raise from_status(error.status, body.encode()) from error
        except _LOST as error:
            raise Unreachable(0, "StreamLost", f"{path} broke: {_why(error)}") from error

    async def _lines(
        self, resource: Resource, path: str, params: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[bytes]:
        """Yield the lines of a streamed response.

        Raises:
            ApiError: When the API server refuses the request.
            Unreachable: When the connection breaks.
        """
        try:
            response = await self._send("GET", resource, path, params, None, timeout)
            if response.status == 401:  # credentials can expire while there are only streams
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
        """Send a request and return the JSON response. If the error may be temporary, retry the request."""
        with metrics.request_seconds(method, self._host, resource.plural).time():
            return (await self._answer(method, resource, path, params or {}, body, content))[0]

    async def _page(self, resource: Resource, path: str, params: Mapping[str, str], single: bool) -> tuple[Raw, int]:
        """Return one page of a list, and the size of the page in bytes.

        Raises:
            _PageTooLarge: When the page is too large. If `single` is true, the page was requested with only one object,
                and its size is not limited.
        """
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
        """Send a request, and return the JSON response with its size in bytes.

        If the error may be temporary, retry the request.

        Raises:
            _PageTooLarge: When the response has more than `most_bytes` bytes.
            ApiError: When the API server refuses the request.
            Unreachable: When there is no usable response within `give_up_after` seconds.
        """
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
            except _LOST as connection_error:
                error = Unreachable(
                    0, "Unreachable", f"{self.access.server} can't be reached: {_why(connection_error)}"
                )
            except ValueError as decode_error:  # perhaps an HTML page of a proxy
                error = Unreachable(
                    0, "Unreachable", f"{self.access.server} sent an answer that is not JSON: {decode_error}"
                )
            if time.monotonic() + wait >= deadline:
                if isinstance(error, Unreachable):
                    raise error  # its message may be more specific
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
    """Read the body of a response.

    Raises:
        _PageTooLarge: When the body has more than `most_bytes` bytes. The connection is then closed, so that the server
            stops sending.
    """
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
    """Return a description of a connection error, for an error message.

    If a server or proxy has answered, the description does not use the text of aiohttp's exception. That text contains
    the proxy's URL with its password.
    """
    if isinstance(lost, aiohttp.TooManyRedirects):
        return "it redirects in a circle"
    if isinstance(lost, aiohttp.ClientHttpProxyError):
        return f"its proxy answered {lost.status} {lost.message}"
    if isinstance(lost, aiohttp.ClientResponseError):
        return f"its answer can't be read: {' '.join(lost.message.split()).rstrip(' ^')}"
    return str(lost) or ("timed out" if isinstance(lost, TimeoutError) else type(lost).__name__)


def _passes(status: int) -> bool:
    """Return whether an error with this HTTP status may be temporary, so that the client retries the request."""
    return status == 429 or status >= 500


def _of_stream(status: int, body: bytes) -> ApiError:
    """Return the exception for a stream (a watch or a log) that the API server refused with this status.

    The client does not retry streams, because only the caller knows at which resourceVersion to continue.
    """
    error = from_status(status, body)
    return Unreachable(error.status, error.reason, error.message) if _passes(status) else error


def _event(line: bytes) -> tuple[str, Raw]:
    """Return the event that a line of a watch contains: its type and its object.

    Raises:
        Unreachable: When the line is not a complete event, because the stream broke within the line.
    """
    try:
        event = deep_json.loads(line)
        kind, obj = event["type"], event["object"]
        if not isinstance(kind, str) or not isinstance(obj, dict):
            raise TypeError("no event")
    except (ValueError, KeyError, TypeError) as error:
        raise Unreachable(0, "StreamLost", f"a watch sent an invalid event ({error}): {line[:80]!r}") from error
    return kind, obj


def _seconds(text: str) -> float:
    """Return the seconds in a Retry-After header; 0.0 if the header contains a date."""
    return float(text) if text.isdecimal() else 0.0


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
