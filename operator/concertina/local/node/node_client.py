"""Client for the requests of a node to the API server, with the node's own certificate. Objects are plain dicts."""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

Object = dict[str, Any]
_log = logging.getLogger(__name__)
JSON, STRATEGIC_MERGE = "application/json", "application/strategic-merge-patch+json"


class RequestRefused(Exception):
    """Error response of the API server, with its HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NodeClient:
    """Client for requests and watches. Create it inside a running event loop, and call close() at the end."""

    def __init__(self, server: str, tls: ssl.SSLContext) -> None:
        connector = aiohttp.TCPConnector(ssl=tls, limit=64)
        self._session = aiohttp.ClientSession(server, connector=connector, timeout=aiohttp.ClientTimeout(total=15))

    async def close(self) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: Object | None = None, content_type: str = JSON) -> Object:
        """Send a request and return the decoded response.

        Raises:
            RequestRefused: When the API server refuses the request.
            aiohttp.ClientError: When the API server is unreachable.
            TimeoutError: When there is no response in time.
        """
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, path, data=data, headers={"Content-Type": content_type}) as response:
            text = await response.text()
            if response.status >= 300:
                raise RequestRefused(response.status, _message(text))
            answer: Object = json.loads(text)
            return answer

    async def get(self, path: str) -> Object:
        return await self.call("GET", path)

    async def follow(self, path: str, selector: str) -> AsyncIterator[tuple[str, list[Object]]]:
        """Yield all objects of a collection, and then each change of an object, forever.

        The first item is ("LIST", all objects). Each further item is ("ADDED" | "MODIFIED" | "DELETED", [object]). If
        the watch breaks, the generator begins again with a LIST. During an outage of the API server, it waits.
        """
        while True:
            try:
                listed = await self.get(f"{path}?fieldSelector={selector}")
                yield "LIST", listed["items"]
                async for kind, item in self._watch(path, selector, listed["metadata"]["resourceVersion"]):
                    yield kind, [item]
            except (aiohttp.ClientError, TimeoutError, RequestRefused, ConnectionError) as error:
                _log.warning("watch of %s: %s; trying again", path, error or type(error).__name__)
                await asyncio.sleep(0.25)

    async def _watch(self, path: str, selector: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield the events of a watch.

        Raises:
            RequestRefused: When the API server refuses or ends the watch.
        """
        query = f"{path}?fieldSelector={selector}&watch=1&allowWatchBookmarks=true&resourceVersion={version}"
        timeout = aiohttp.ClientTimeout(total=None, sock_read=90)  # bookmarks come every minute
        async with self._session.get(query, timeout=timeout) as response:
            if response.status >= 300:
                raise RequestRefused(response.status, _message(await response.text()))
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RequestRefused(event["object"].get("code", 500), event["object"].get("message", ""))
                    if event["type"] != "BOOKMARK":
                        yield event["type"], event["object"]


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
