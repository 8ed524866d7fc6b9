"""HTTP endpoints for the kubelet: liveness, readiness, and the name of the leader."""

from __future__ import annotations

import asyncio
import enum
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from concertina.controller.serving import Answer, listening
from concertina.kube.watch.lease import Lease


class Path(enum.StrEnum):
    """URL paths of the health endpoints."""

    LIVE = "/healthz"
    """Path of the liveness probe: it responds if the event loop runs. If it does not respond, only a restart helps."""
    READY = "/readyz"
    """Path of the readiness probe: whether this process works, or is a standby that could work once it gets the Lease.
    """
    LEADER = "/leaderz"
    """Path that responds with the name of the leader, as far as this process knows it, in JSON."""


class ProcessHealth:
    """Health of this operator process, and the handlers of its health endpoints."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.synced = asyncio.Event()
        """Event that is set once this process, as the leader, has listed all objects that existed when it started."""

    def unready(self) -> str:
        """Return why this process is not ready; empty if it is ready."""
        if not self._lease.answered_lately:
            return "the API server does not answer requests for the Lease"
        if self._lease.held and not self.synced.is_set():
            return "this operator is the leader, and it has not yet listed all nodes, pods, queues and TrainingJobs"
        return ""

    async def live(self, _: web.Request) -> web.Response:
        """Return a response with status 200. The response itself proves that the event loop runs."""
        return web.Response(text="ok\n")

    async def ready(self, _: web.Request) -> web.Response:
        """Return a response with status 200 if this process is ready; otherwise status 503 with the reason."""
        reason = self.unready()
        return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")

    async def leader(self, _: web.Request) -> web.Response:
        """Return a response with the name of the leader.

        Its status is 200 on a standby process too, which is healthy.
        """
        return web.json_response({"leads": self._lease.held, "leader": self._lease.holder})


def served(address: tuple[str, int] | None, health: ProcessHealth) -> AbstractAsyncContextManager[None]:
    """Serve the health endpoints on an address while the context is open. If the address is None, serve nothing."""
    answers: dict[str, Answer] = {Path.LIVE: health.live, Path.READY: health.ready, Path.LEADER: health.leader}
    return listening(address, answers)
