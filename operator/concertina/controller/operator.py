"""`concertina operator`: the process. Everything is wired together here, and nothing is decided."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from aiohttp import web

from concertina.agents.links import Links
from concertina.controller import journal, master_keys
from concertina.controller.apply import Applier
from concertina.controller.master_keys import MasterKeyError, MasterKeys
from concertina.controller.queue import KeyedQueue
from concertina.controller.reconcile import Reconciler
from concertina.controller.settings import Settings, SettingsError, from_environment
from concertina.controller.world import PROGRESS_SECONDS, World
from concertina.kube.access import Access, NoAccess, load
from concertina.kube.client import Client
from concertina.kube.manifests.names import SELECTOR
from concertina.kube.parse.views import OwnedPod, node_view, pod_view
from concertina.kube.resources import NODES, PODS, Raw
from concertina.kube.watch import trainingjobs
from concertina.kube.watch.events import Events
from concertina.kube.watch.lease import Lease, LeaseLost
from concertina.kube.watch.reflector import Reflector
from concertina.plan.plan import plan
from concertina.plan.types import NodeView

LEASE = "concertina-operator"
GIVE_UP_SECONDS = 10.0
"""A pass that can't reach the API server for so long is given up, and made again on what is true by then."""
RELIST_SECONDS = 10.0
"""After kopf has listed all jobs again: jobs it did not name are looked up, for it tells of no deletion it missed."""


def main() -> None:
    """Runs until SIGTERM or SIGINT (exit 0) or until the Lease is lost (exit 1: the pod is started again)."""
    journal.configure(os.environ.get("CONCERTINA_LOG_LEVEL", "INFO"))
    try:
        settings = from_environment()
        sys.exit(asyncio.run(serve(settings)))
    except (SettingsError, NoAccess, MasterKeyError) as error:
        sys.exit(f"concertina operator: {error}")


async def serve(settings: Settings) -> int:
    stop = asyncio.Event()
    _on_signals(stop)
    access = await load()
    async with (
        Client(access, give_up_after=GIVE_UP_SECONDS) as client,
        Client(access, give_up_after=0.0) as pods,
        Client(access, give_up_after=GIVE_UP_SECONDS) as lease_client,  # it waits behind no other request
        _probes(settings),
    ):
        lease = Lease(lease_client, settings.namespace, LEASE, settings.identity)
        if not await _first(lease.acquire(), stop):
            return 0
        try:
            # Not before: the keys may have changed while another operator acted.
            keys = await master_keys.read(client, settings)
            return await Operator(settings, access, client, pods, lease, keys).run(stop)
        finally:
            await lease.release()


class Operator:
    """The one that acts: reflectors, queue, kopf and the agents' streams, for as long as the Lease is held."""

    def __init__(
        self, settings: Settings, access: Access, client: Client, pods: Client, lease: Lease, keys: MasterKeys
    ) -> None:
        """`pods`: the client of writes that are made beside the passes."""
        self._settings = settings
        self._access = access
        self._client = client
        self._lease = lease
        self._keys = keys
        self._links = Links(self._agent_changed)
        self._world = World(self._changed, self._links.views, tuple(keys.by_id))
        self._events = Events(client, settings.identity)
        namespaces: tuple[str | None, ...] = settings.watch_namespaces or (None,)
        self._pods: dict[str | None, Reflector[OwnedPod]] = {
            namespace: Reflector(client, PODS, pod_view, self._world.hear_pod, namespace, SELECTOR)
            for namespace in namespaces
        }
        as_node = functools.partial(node_view, notice_taints=settings.notice_taints)
        self._nodes: Reflector[NodeView] = Reflector(client, NODES, as_node, self._world.hear_node)
        applier = Applier(
            client=client,
            pods=pods,
            world=self._world,
            links=self._links,
            events=self._events,
            images=settings.images,
            keys=keys,
            remember=self._remember,
        )
        self._reconciler = Reconciler(
            self._world,
            self._links,
            applier,
            plan,
            keys,
            may_act=lambda: lease.held,
            changed_within=lambda uid, seconds: self._queue.add_within(uid, seconds),
        )
        self._queue = KeyedQueue(self._reconciler.run)
        self._named: set[str] = set()
        """Jobs that kopf has named since it began its latest list."""
        self._sweep: asyncio.TimerHandle | None = None
        self._checks: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> int:
        """The exit code."""
        work = [
            self._nodes.run(),
            *(pods.run() for pods in self._pods.values()),
            self._events.run(),
            self._lease.keep(),
        ]
        if self._settings.makes_master_key:
            work.append(master_keys.keep(self._client, self._settings, self._keys))
        background = [asyncio.create_task(part) for part in work]
        try:
            return await self._run(stop, background)
        finally:
            await self._queue.close()
            self._reconciler.close()
            self._links.close()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    async def _run(self, stop: asyncio.Event, background: list[asyncio.Task[None]]) -> int:
        synced = asyncio.gather(self._nodes.synced.wait(), *(pods.synced.wait() for pods in self._pods.values()))
        jobs = asyncio.create_task(trainingjobs.list_jobs(self._client, self._settings.watch_namespaces))
        if not await _first(asyncio.gather(synced, jobs), stop):
            return 0
        for obj in jobs.result():
            self._world.hear_job(obj)
        journal.decision("started", identity=self._settings.identity, jobs=len(jobs.result()))
        self._queue.start()
        stop_kopf = asyncio.Event()
        kopf = asyncio.create_task(
            trainingjobs.run(
                self._access,
                self._settings.identity,
                self._settings.watch_namespaces,
                self._hear_job,
                stop_kopf,
                started=lambda: _on_signals(stop),
            )
        )
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopped, kopf, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopped}:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, LeaseLost):
                journal.decision("lease lost", message=str(error))
                os._exit(1)  # at once: whatever is under way must not be finished by two
            journal.decision("ended", task=task.get_name(), error=repr(error))
        await self._queue.close()
        self._links.close()
        stop_kopf.set()
        stopped.cancel()
        await asyncio.wait([kopf], timeout=5)
        return 0 if done <= {stopped} else 1

    # --- what is heard ---------------------------------------------------------------------------------------------

    def _changed(self, uid: str) -> None:
        self._queue.add(uid)

    def _agent_changed(self, uid: str, at_once: bool) -> None:
        if at_once:
            self._queue.add(uid)
        else:
            self._queue.add_within(uid, PROGRESS_SECONDS)

    def _remember(self, pod: Raw) -> None:
        reflector = self._pods.get(pod["metadata"]["namespace"]) or self._pods[None]
        reflector.remember(pod)

    def _hear_job(self, kind: str | None, obj: Raw) -> None:
        uid = obj["metadata"]["uid"]
        if kind == "DELETED":
            self._reconciler.forget(uid)
            self._queue.forget(uid)
            return
        self._named.add(uid)
        if kind is None and self._sweep is None:
            self._named = {uid}
            self._sweep = asyncio.get_running_loop().call_later(RELIST_SECONDS, self._look_up_missing)
        self._world.hear_job(obj)

    def _look_up_missing(self) -> None:
        self._sweep = None
        for uid in [job.view.uid for job in self._world.jobs() if job.view.uid not in self._named]:
            check = asyncio.create_task(self._look_up(uid))
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)

    async def _look_up(self, uid: str) -> None:
        if not await self._reconciler.check(uid):
            self._queue.forget(uid)


def _on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _first(work: Coroutine[Any, Any, Any] | asyncio.Future[Any], stop: asyncio.Event) -> bool:
    """Whether `work` was done before `stop` was set; cancels it otherwise."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


@contextlib.asynccontextmanager
async def _probes(settings: Settings) -> AsyncIterator[None]:
    """GET /healthz answers 200 for as long as the event loop turns, with the Lease or without it."""
    if settings.health is None:
        yield
        return

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.add_routes([web.get("/healthz", healthy)])
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, *settings.health).start()
    try:
        yield
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    main()
