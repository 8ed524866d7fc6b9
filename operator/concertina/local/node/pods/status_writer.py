"""Writes of one pod's status to the API server. Many changes within a short time cause only one write."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import aiohttp

from concertina.local.node import ending
from concertina.local.node.node_client import STRATEGIC_MERGE, NodeClient, RequestRefused
from concertina.local.node.node_status import PodFacts, pod_status

Object = dict[str, Any]
_log = logging.getLogger(__name__)
_RETRY = 0.5  # seconds


class PodStatusWriter:
    """Task that writes the status of one pod. `facts` returns the current state of the pod at each write."""

    def __init__(self, client: NodeClient, pod: Object, facts: Callable[[], PodFacts]) -> None:
        metadata = pod["metadata"]
        self._client, self._facts = client, facts
        self._uid = metadata["uid"]
        self._path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        self._written: Object = pod.get("status") or {}
        self._stale = False  # the API server has another status
        self._dirty, self._clean = asyncio.Event(), asyncio.Event()
        self._clean.set()
        self._task = asyncio.create_task(self._run())

    def mark(self) -> None:
        """Record that the pod's status has changed, so that it is written soon."""
        self._clean.clear()
        self._dirty.set()

    def observe(self, status: Object) -> None:
        """Write the pod's status again if another controller has changed its conditions.

        For example, Kubernetes' node lifecycle controller marks the pods of a node as unready if the node does not
        respond.
        """
        values_by_type = {condition["type"]: condition["status"] for condition in status.get("conditions") or []}
        # Only that controller writes different values for the two.
        if values_by_type.get("Ready") != values_by_type.get("ContainersReady"):
            self._stale = True
            self.mark()

    async def flush(self) -> None:
        """Wait until all changes recorded by `mark` are written, or until the pod no longer exists."""
        await self._clean.wait()

    async def close(self) -> None:
        await ending.end(self._task)

    async def _run(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            gone = not await self._write()
            if gone or not self._dirty.is_set():
                self._clean.set()
            if gone:
                return

    async def _write(self) -> bool:
        """Write the status. Return False if the pod no longer exists.

        The state is read again for each try, because it may have changed.
        """
        while True:
            status = pod_status(self._facts(), self._written)
            if status == self._written and not self._stale:
                return True
            self._stale = False
            body = {"metadata": {"uid": self._uid}, "status": _replacing_addresses(status)}
            try:
                await self._client.call("PATCH", self._path, body, STRATEGIC_MERGE)
                self._written = status
                return True
            except RequestRefused as error:
                if error.status in (404, 409):  # gone, or another pod has the name: the uid is a precondition
                    return False
                _log.warning("status of %s not written: %s", self._path, error)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                _log.warning("status of %s not written: %s", self._path, error or type(error).__name__)
            self._stale = True
            await asyncio.sleep(_RETRY)


def _replacing_addresses(status: Object) -> Object:
    """Return the status as a patch that replaces the pod's addresses.

    A strategic merge patch would add the new address of a rebooted pod to the old one, which the API server refuses.
    """
    if "podIPs" not in status:
        return status
    return status | {"podIPs": [*status["podIPs"], {"$patch": "replace"}]}
