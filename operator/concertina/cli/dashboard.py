"""`concertina dashboard`: web pages about all jobs and about each job, served to browsers on this machine.

The dashboard has the permissions of the caller and only reads.
"""

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
from concertina.kube.reflector import Reflector
from concertina.kube.resources import TRAINING_JOBS, Raw
from concertina.report.dashboard_page import DashboardView, job_page, jobs_page, policy, trouble_page
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.console import plain
from concertina.terminal.follow import events_of
from concertina.terminal.job_table import JobRow, RowOrder, ordered, row

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")
"""Host names that a browser may use for the dashboard.

If another site's name resolves to this address (DNS rebinding), the request has that other name and is refused.
"""
AT_ONCE = 4
"""Largest number of jobs that the dashboard reads at the same time."""
MOST_KEY = 317
"""Maximum length of a label key in characters."""
WINDOW_SECONDS, MOST_SECONDS, MOST_READINGS = 30.0, 600.0, 64
NOT_ASKED = (
    "the dashboard does not ask agents or read logs: use `concertina diagnose` and `concertina report` for these"
)
_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
Page = Callable[[str], str]
"""Function that renders a page, given the nonce for its style and script."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Readings:
    """Earlier readings of the jobs whose pages are open in a browser, one for each job.

    A diagnosis compares the present reading of a job with its earlier reading.
    """

    def __init__(self) -> None:
        self._pairs: OrderedDict[str, tuple[tuple[float, Raw], tuple[float, Raw]]] = OrderedDict()

    def earlier(self, job: Raw, now: float) -> Raw | None:
        """Return the earlier reading to compare with `job`.

        The result is None if there is no earlier reading, or if no browser has requested the job's page for
        MOST_SECONDS.

        Args:
            job: Present reading.
            now: Monotonic time in seconds.
        """
        uid = job["metadata"]["uid"]
        old, new = self._pairs.pop(uid, ((now, job), (now, job)))
        if now - new[0] > MOST_SECONDS:
            old = new = now, job
        elif now - new[0] >= WINDOW_SECONDS:
            old, new = new, (now, job)
        self._pairs[uid] = old, new
        if len(self._pairs) > MOST_READINGS:
            self._pairs.popitem(last=False)
        return old[1] if old[1] is not job else None


class Dashboard:
    """Web server of the dashboard, with a watch of the jobs that its pages show."""

    def __init__(self, client: Client, namespace: str | None, by: str) -> None:
        """Create a dashboard that does not serve pages yet.

        Args:
            client: Client with the caller's permissions.
            namespace: Namespace of the jobs; None for all namespaces.
            by: How to group jobs, as in `job_table.group`.
        """
        self._client, self._namespace, self._by = client, namespace, by
        self.jobs: Reflector[JobRow] = Reflector(client, TRAINING_JOBS, row, lambda old, new: None, namespace)
        self._readings = Readings()
        self._read_slots = asyncio.Semaphore(AT_ONCE)

    @contextlib.asynccontextmanager
    async def served(self, port: int) -> AsyncIterator[str]:
        """Context manager that serves the pages. Yield the address of the dashboard.

        Raises:
            UserError: When the port can't be used.
        """
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
                f"port {port} is not available: {os.strerror(error.errno or 0)}. Choose another one with --port, "
                "or 0 for any free port"
            ) from error
        try:
            yield f"http://{ADDRESS}:{runner.addresses[0][1]}/"
        finally:
            await runner.cleanup()

    async def reach(self) -> None:
        """Check that jobs can be listed now, with a request for a single object.

        Raises:
            ApiError: When jobs can't be listed.
        """
        await anext(self._client.pages(TRAINING_JOBS, self._namespace, chunk=1))

    async def _list(self, request: web.Request) -> web.Response:
        query = request.query
        view = DashboardView(
            self._namespace is None,
            query.get("by", self._by)[:MOST_KEY],
            RowOrder(sort) if (sort := query.get("sort", "")) in list(RowOrder) else RowOrder.ATTENTION,
            int(page) if re.fullmatch(r"[1-9]\d{0,5}", page := query.get("page", "1")) else 1,
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
            async with self._read_slots:
                job = await self._client.get(TRAINING_JOBS, namespace, name)
                events = await events_of(self._client, job)
            earlier = self._readings.earlier(job, time.monotonic())
            record = EvidenceRecord(job=job, at=time.time(), live=True, earlier=earlier, unseen=(NOT_ASKED,))
            evidence, diagnosis = judge(record)
        except NotFound:
            return _page(lambda nonce: trouble_page(title, "There is no such job.", nonce), 404)
        except (ApiError, UserError) as error:
            sentence = f"{error}."
            return _page(lambda nonce: trouble_page(title, sentence, nonce), 502)
        return _page(lambda nonce: job_page(title, evidence, diagnosis, record.unseen, events, nonce))


async def run(target: Target, all_namespaces: bool, by: str, port: int) -> None:
    """Serve the dashboard until Ctrl-C."""
    async with target.connect() as (client, namespace):
        dashboard = Dashboard(client, None if all_namespaces else namespace, by)
        await dashboard.reach()
        async with dashboard.served(port) as address, asyncio.TaskGroup() as tasks:
            tasks.create_task(dashboard.jobs.run())
            await dashboard.jobs.synced.wait()
            plain().print(f"The dashboard is at {address}, for this machine only. Press Ctrl-C to stop it.")


def _page(render: Page, status: int = 200) -> web.Response:
    nonce = secrets.token_urlsafe(16)
    headers = {
        "Content-Security-Policy": policy(nonce),
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return web.Response(status=status, body=render(nonce).encode("utf-8", "replace"), headers=headers)


@web.middleware
async def _as_page(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests with another host name, and show HTTP errors as a page.

    A malicious web site could otherwise read the dashboard through the user's browser, under the site's own host name
    (DNS rebinding).
    """
    if request.host.rpartition(":")[0] not in HOSTS and request.host not in HOSTS:
        sentence = f"This is concertina dashboard. It answers only at http://{ADDRESS}."
        return _page(lambda nonce: trouble_page("Not here", sentence, nonce), 421)
    try:
        return await handler(request)
    except web.HTTPError as error:
        sentence = f"{request.method} {request.path}: {error.reason}."
        return _page(lambda nonce: trouble_page("Not here", sentence, nonce), error.status)
