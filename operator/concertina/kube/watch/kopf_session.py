"""HTTP session for kopf that changes behaviour for which kopf has no setting.

It solves four problems of kopf (decision "kopf through its public API"):

- kopf limits a page of a list by its number of objects, whatever their size. The session makes each of kopf's watches
  begin at a list that this operator has made.
- kopf does not report objects that are missing from a later list. The operator compares its own lists instead.
- kopf decodes with the limits of Python's JSON decoder. The session cuts deeply nested objects before kopf decodes
  them.
- kopf requests the kinds that the API server serves only once. The session repeats this request until the API server
  lists TrainingJobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp

from concertina import metrics
from concertina.api import GROUP, PLURAL, VERSION
from concertina.kube import deep_json
from concertina.kube.access import Access
from concertina.kube.client import READ_AHEAD, REQUEST_SECONDS, WATCH_SILENCE_SECONDS
from concertina.kube.reflector import WatchEnd
from concertina.kube.watch.kopf_import import kopf

log = logging.getLogger(__name__)
UNKNOWN_SECONDS = 1.0
"""Seconds before the next request if the API server does not serve TrainingJobs yet."""
_INITIAL_EVENTS = {"sendInitialEvents", "resourceVersionMatch"}
_ERROR = b'{"type":"ERROR"'


class KopfSession:
    """Middleware of kopf's HTTP session that changes kopf's discovery requests and watches."""

    def __init__(
        self,
        access: Access,
        begin: Callable[[str | None], Awaitable[str]],
        begun: Callable[[str | None], None],
    ) -> None:
        """Create the middleware. It has an effect on the sessions that `login` returns.

        Args:
            access: Address and credentials of the API server.
            begin: Function that returns the resourceVersion at which the watch of a namespace (None: of all namespaces)
                begins. It may wait for any time.
            begun: Function to call with the namespace when the API server has accepted that watch.
        """
        self._access = access
        self._begin = begin
        self._begun = begun
        self._warned = False
        metrics.begin_at_zero(metrics.WATCH_RESTARTS, [PLURAL], WatchEnd)

    def login(self) -> kopf.AiohttpSession:
        """Return a new HTTP session with this middleware. kopf calls this method, and closes the session."""
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._access.ssl_context()),
            headers={"User-Agent": "concertina"},
            proxy=self._access.proxy,
            read_bufsize=READ_AHEAD,
            middlewares=(self._requested,),
        )
        return kopf.AiohttpSession(
            server=self._access.server, default_namespace=self._access.namespace, aiohttp_session=session
        )

    async def _requested(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if "watch" in request.url.query:
            return await self._watch(request, handler)
        while True:
            response = await self._answer(request, handler)
            if _names_training_jobs(request.url.path, response.status, await response.read()):
                return response
            if not self._warned:
                log.warning("the API server does not list TrainingJobs among its resources yet; retrying until it does")
            self._warned = True
            await asyncio.sleep(UNKNOWN_SECONDS)

    async def _watch(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Start a watch at the resourceVersion of a list that this operator has made.

        If the request had no resourceVersion, as kopf sends it, the watch would begin with all existing objects.
        """
        *_, parent, namespace, _plural = request.url.parts
        watched_namespace = namespace if parent == "namespaces" else None
        begins = "resourceVersion" not in request.url.query
        if begins:
            query = {name: value for name, value in request.url.query.items() if name not in _INITIAL_EVENTS}
            request.url = request.url.with_query({**query, "resourceVersion": await self._begin(watched_namespace)})
        response = await self._answer(request, handler, streams=True)
        if response.status < 400:
            if begins:
                self._begun(watched_namespace)
            response.content = _WatchLines(response.content)  # type: ignore[assignment] # it stands in for a StreamReader
        return response

    async def _answer(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType, streams: bool = False
    ) -> aiohttp.ClientResponse:
        """Return the API server's response. Its body is already read, unless `streams` is true.

        The time limit is set here, because kopf's own limit would include the time for which a request waits in this
        session.
        """
        response = await self._authorized(request, handler, streams)
        if response.status == 401:
            response.close()
            await self._access.renew(request.headers.get("Authorization", ""))
            response = await self._authorized(request, handler, streams)
        return response

    async def _authorized(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType, streams: bool
    ) -> aiohttp.ClientResponse:
        request.server_hostname = self._access.server_name
        if authorization := await self._access.authorization():
            request.headers["Authorization"] = authorization
        async with asyncio.timeout(WATCH_SILENCE_SECONDS if streams else REQUEST_SECONDS):
            response = await handler(request)
            if not streams:
                await response.read()
        return response


def _names_training_jobs(path: str, status: int, body: bytes) -> bool:
    """Return False if a response is a discovery document that should list TrainingJobs but does not list them yet.

    TrainingJobs can be served a moment before discovery lists them. Behind a load balancer, the response may also come
    from another API server, which does not serve TrainingJobs yet.
    """
    if status >= 400 and status != 404:
        return True  # kopf retries such a request
    try:
        if path.endswith("/apis"):
            return any(group["name"] == GROUP for group in deep_json.loads(body)["groups"])
        if path.endswith(f"/apis/{GROUP}/{VERSION}"):
            return any(kind["name"] == PLURAL for kind in deep_json.loads(body)["resources"])
    except (ValueError, KeyError, TypeError):  # an HTML page of a proxy, or the group does not exist yet
        return False
    return True


class _WatchLines:
    """Body of a watch response, divided into complete lines that kopf can decode.

    The body ends if no data arrives for too long.
    """

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        end, rest = WatchEnd.CLOSED, b""
        try:
            while data := await self._read():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(_ERROR):
                        end = WatchEnd.GONE
                    yield deep_json.cut(line) + b"\n"
        except Exception:
            end = WatchEnd.BROKEN
            raise
        finally:
            metrics.WATCH_RESTARTS.labels(PLURAL, end).inc()

    async def _read(self) -> bytes:
        async with asyncio.timeout(WATCH_SILENCE_SECONDS):
            return await self._content.readany()
