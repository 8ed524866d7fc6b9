"""HTTP endpoints for the kubelet: whether this process lives, whether it can serve, and which process leads."""

from __future__ import annotations

import asyncio
import enum
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from concertina.controller.serving import Answer, listening
from concertina.kube.watch.lease import Lease


class Path(enum.StrEnum):
    """Endpoints."""

    LIVE = "/healthz"
    """Liveness: the event loop runs. Only a restart can help a process that does not answer."""
    READY = "/readyz"
    """Readiness: this process acts, or can act as soon as it gets the Lease."""
    LEADER = "/leaderz"
    """Name of the process that leads, as this process knows it, in JSON."""


class ProcessHealth:
    """Health of this process."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.synced = asyncio.Event()
        """Set once a leader knows everything that existed before it."""

    def unready(self) -> str:
        """Return the reason why this process cannot serve, or an empty string."""
        if not self._lease.answered_lately:
            return "the API server does not answer requests for the Lease"
        if self._lease.held and not self.synced.is_set():
            return "this operator leads, and lists what exists: nodes, pods, queues and TrainingJobs"
        return ""

    async def live(self, _: web.Request) -> web.Response:
        """Answer in the event loop, which is all that liveness means."""
        return web.Response(text="ok\n")

    async def ready(self, _: web.Request) -> web.Response:
        """Answer 503 with the reason when this process cannot serve."""
        reason = self.unready()
        return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")

    async def leader(self, _: web.Request) -> web.Response:
        """Name the leader. A standby answers 200 too: it is as healthy as the leader."""
        return web.json_response({"leads": self._lease.held, "leader": self._lease.holder})


def served(address: tuple[str, int] | None, health: ProcessHealth) -> AbstractAsyncContextManager[None]:
    """Serve the endpoints on that address, or nothing when there is none."""
    answers: dict[str, Answer] = {Path.LIVE: health.live, Path.READY: health.ready, Path.LEADER: health.leader}
    return listening(address, answers)
