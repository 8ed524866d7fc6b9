"""`concertina dashboard`: all jobs and each job as pages, served on this machine to its own browser, with the caller's
permissions. It reads, and has nothing that writes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from concertina.cli.collect_evidence import EvidenceRecord
from concertina.cli.diagnose import judge
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, NotFound
from concertina.kube.resources import TRAINING_JOBS, Raw
from concertina.kube.watch.reflector import Reflector
from concertina.report.dashboard_page import DashboardView, job_page, jobs_page, policy, trouble_page
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.console import plain
from concertina.terminal.follow import events_of
from concertina.terminal.job_table import JobRow, RowOrder, ordered, row

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")
"""That a browser may have asked for: a page from elsewhere whose name was made to lead here has another one."""
AT_ONCE = 4
"""Jobs that are looked at."""
MOST_KEY = 317
"""Characters of a label's key."""
WINDOW_SECONDS, MOST_SECONDS, MOST_READINGS = 30.0, 600.0, 64
NOT_ASKED = "agents and logs are not asked every few seconds: `concertina diagnose` and `concertina report` ask them"
_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
Page = Callable[[str], str]
"""By the nonce of its style and script."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Readings:
    """Of each job that is looked at, one from some time before: a diagnosis goes by what has changed since."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[tuple[float, Raw], tuple[float, Raw]]] = OrderedDict()

    def earlier(self, job: Raw, now: float) -> Raw | None:
        """What is to be compared with `job`; None at first, and after a long time. `now`: monotonic seconds."""
        uid = job["metadata"]["uid"]
        old, new = self._kept.pop(uid, ((now, job), (now, job)))
        if now - new[0] > MOST_SECONDS:
            old = new = now, job
        elif now - new[0] >= WINDOW_SECONDS:
            old, new = new, (now, job)
        self._kept[uid] = old, new
        if len(self._kept) > MOST_READINGS:
            self._kept.popitem(last=False)
        return old[1] if old[1] is not job else None


class Dashboard:
    def __init__(self, client: Client, namespace: str | None, by: str) -> None:
        """`namespace`: None for all."""
        self._client, self._namespace, self._by = client, namespace, by
        self.jobs: Reflector[JobRow] = Reflector(client, TRAINING_JOBS, row, lambda old, new: None, namespace)
        self._readings = Readings()
        self._looks = asyncio.Semaphore(AT_ONCE)

    @contextlib.asynccontextmanager
    async def served(self, port: int) -> AsyncIterator[str]:
        """Its address. Raises UserError where the port can't be had."""
        app = web.Application(middlewares=[_as_page])
        job = f"/jobs/{{namespace:{_NAME}}}/{{name:{_NAME}}}"
        app.add_routes([web.get("/", self._list), web.get(job, self._job)])
        runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, ADDRESS, port).start()
        except OSError as error:
            await runner.cleanup()
            raise UserError(
                f"port {port} can't be had: {os.strerror(error.errno or 0)}; --port takes another, or 0"
            ) from error
        try:
            yield f"http://{ADDRESS}:{runner.addresses[0][1]}/"
        finally:
            await runner.cleanup()

    async def reach(self) -> None:
        """Raises ApiError where jobs can't be listed now. One object: the watch has the others."""
        await anext(self._client.pages(TRAINING_JOBS, self._namespace, chunk=1))

    async def _list(self, request: web.Request) -> web.Response:
        asked = request.query
        view = DashboardView(
            self._namespace is None,
            asked.get("by", self._by)[:MOST_KEY],
            RowOrder(sort) if (sort := asked.get("sort", "")) in list(RowOrder) else RowOrder.ATTENTION,
            int(page) if re.fullmatch(r"[1-9]\d{0,5}", page := asked.get("page", "1")) else 1,
        )
        trouble = "" if self.jobs.synced.is_set() else "The jobs are still being listed."
        try:
            await self.reach()
        except ApiError as error:
            trouble = f"{error}."
        if not trouble and self.jobs.trouble:
            trouble = f"{self.jobs.trouble}."
        rows = ordered(self.jobs.values(), view.order, view.by)
        return _page(lambda nonce: jobs_page(rows, view, time.time(), nonce, trouble))

    async def _job(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        title = f"{namespace}/{name}"
        try:
            async with self._looks:
                job = await self._client.get(TRAINING_JOBS, namespace, name)
                events = await events_of(self._client, job)
            earlier = self._readings.earlier(job, time.monotonic())
            record = EvidenceRecord(job=job, at=time.time(), live=True, earlier=earlier, unseen=(NOT_ASKED,))
            seen, found = judge(record)
        except NotFound:
            return _page(lambda nonce: trouble_page(title, "There is no such job.", nonce), 404)
        except (ApiError, UserError) as error:
            sentence = f"{error}."
            return _page(lambda nonce: trouble_page(title, sentence, nonce), 502)
        return _page(lambda nonce: job_page(title, seen, found, record.unseen, events, nonce))


async def run(target: Target, all_namespaces: bool, by: str, port: int) -> None:
    """Until Ctrl-C."""
    async with target.connect() as (client, namespace):
        dashboard = Dashboard(client, None if all_namespaces else namespace, by)
        await dashboard.reach()
        async with dashboard.served(port) as address, asyncio.TaskGroup() as tasks:
            tasks.create_task(dashboard.jobs.run())
            await dashboard.jobs.synced.wait()
            plain().print(f"{address} shows the jobs, to this machine alone, until Ctrl-C.")


def _page(made: Page, status: int = 200) -> web.Response:
    nonce = secrets.token_urlsafe(16)
    headers = {
        "Content-Security-Policy": policy(nonce),
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return web.Response(status=status, body=made(nonce).encode("utf-8", "replace"), headers=headers)


@web.middleware
async def _as_page(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Who asks under another name is refused, and what is not served is said in a page too."""
    if request.host.rpartition(":")[0] not in HOSTS and request.host not in HOSTS:
        sentence = f"This is concertina dashboard, for http://{ADDRESS} alone."
        return _page(lambda nonce: trouble_page("Not here", sentence, nonce), 421)
    try:
        return await handler(request)
    except web.HTTPError as error:
        sentence = f"{request.method} {request.path}: {error.reason}."
        return _page(lambda nonce: trouble_page("Not here", sentence, nonce), error.status)
