"""Watch of TrainingJobs through kopf's public API: event handlers, settings, and the operator's own HTTP session.

kopf writes nothing to users' objects and stores no state of the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from concertina import backoff
from concertina.api import GROUP, PLURAL, VERSION
from concertina.kube.client import Client, once_reachable
from concertina.kube.errors import Forbidden, Gone, NotFound
from concertina.kube.resources import TRAINING_JOBS, Raw
from concertina.kube.watch import kopf_session
from concertina.kube.watch.kopf_import import kopf

log = logging.getLogger(__name__)
WORKER_SECONDS = 300.0
"""Seconds for which kopf keeps an idle worker task of a job.

Starting a worker delays kopf's watch by one turn of the event loop. With kopf's default of 5 seconds and a thousand
jobs, the watch fell behind, the API server ended it, and deletions were reported a minute late. Workers of deleted jobs
are kept too, and each takes 30 to 50 KiB. With a value of one hour, the operator's memory grew by 10 MiB for each 200
short jobs.
"""
END_SECONDS = 5.0
"""Time limit in seconds for kopf to end its own tasks when the operator stops."""
KEPT_OF_METADATA = {"name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"}
"""Metadata fields that remain in an object in kopf's memory after its handlers have run."""


class Backoffs:
    """Endless series of delays in seconds between attempts, so that kopf waits for the end of an outage."""

    def __iter__(self) -> Iterator[float]:
        return (backoff.seconds(failures, 0.2, 1.0) for failures in itertools.count())


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf storage that computes no differences between versions of an object.

    kopf would copy each object to compare it with the version that was last handled. No handler here needs the
    differences, and the copies took a sixth of the operator's processor time.
    """

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:
        return {}

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


@dataclass(frozen=True)
class Listed:
    """Uids of the jobs in a list, and the list's resourceVersion."""

    uids: set[str]
    version: str


async def list_jobs(client: Client, namespace: str | None, on_job: Callable[[Raw], None]) -> Listed:
    """List the TrainingJobs of a namespace page by page, and call `on_job` for each. None means all namespaces.

    Decoding all jobs of a cluster at once could take more memory than the operator has. This coroutine waits until the
    API server is reachable and serves TrainingJobs.

    Raises:
        Forbidden: When the operator has no permission to list TrainingJobs.
    """
    warned = False
    while True:
        try:
            listing = functools.partial(_list, client, namespace, on_job)
            return await once_reachable("the list of TrainingJobs", listing)
        except Gone:
            log.info(
                "the list of TrainingJobs took so long that the API server no longer has its version; it starts again"
            )
        except NotFound:
            if not warned:
                log.warning("the API server does not know TrainingJobs: install the chart's CRD; waiting for it")
            warned = True
            await asyncio.sleep(kopf_session.UNKNOWN_SECONDS)


async def list_jobs_once_allowed(client: Client, namespace: str | None, on_job: Callable[[Raw], None]) -> Listed:
    """List TrainingJobs as `list_jobs` does. If the operator has no permission, wait until it has."""
    warned = False
    while True:
        try:
            return await list_jobs(client, namespace, on_job)
        except Forbidden as error:
            if not warned:
                subject = "no job is" if namespace is None else f"namespace {namespace} is not"
                log.warning("%s served until the operator may list its TrainingJobs: %s", subject, error)
            warned = True
            await asyncio.sleep(kopf_session.UNKNOWN_SECONDS)


async def _list(client: Client, namespace: str | None, on_job: Callable[[Raw], None]) -> Listed:
    uids, version = set[str](), ""
    async for page, version_of_list in client.pages(TRAINING_JOBS, namespace):
        version = version_of_list
        for obj in page:
            uids.add(obj["metadata"]["uid"])
            on_job(obj)
    return Listed(uids, version)


@dataclass(frozen=True)
class Follower:
    """Callbacks for changes of TrainingJobs, and the resourceVersions at which watches begin."""

    versions: dict[str | None, str]
    """resourceVersions of lists that the caller has just made, by namespace (None: all namespaces).

    The watches begin at these resourceVersions.
    """
    ready: Callable[[str | None], Awaitable[object]]
    """Coroutine function to await before a namespace is listed."""
    on_job: Callable[[Raw], None]
    """Function to call for each new or changed TrainingJob."""
    on_deleted: Callable[[str], None]
    """Function to call with the uid of each deleted TrainingJob."""
    on_listed: Callable[[str | None, set[str]], None]
    """Function to call after each list of a namespace (None: all namespaces), with the uids of all listed jobs.

    It is needed because kopf does not report a deletion that its watch missed.
    """


class TrainingJobs:
    """kopf operator that watches TrainingJobs and calls a follower's callbacks for each change.

    The watch begins when `follow` is called with the follower.
    """

    def __init__(self, client: Client, identity: str, namespaces: Sequence[str]) -> None:
        self._client = client
        self._identity = identity
        self._namespaces = namespaces
        self._followed = asyncio.Event()
        self._follower: Follower
        self.ended: asyncio.Task[None]
        """Task that ends when the first of kopf's tasks ends. It raises that task's error."""

    def follow(self, follower: Follower) -> None:
        """Start to watch TrainingJobs, and call the follower's callbacks for each change.

        A process can have one follower.
        """
        self._follower = follower
        self._followed.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run kopf while the `async with` block runs.

        kopf replaces the process's signal handlers, so the caller may have to set them again.
        """
        stop = asyncio.Event()
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=_settings(),
            identity=self._identity,  # type: ignore[arg-type] # kopf's own guess asks for the user's name: pods have none
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=stop,
        )
        self.ended = asyncio.create_task(_first_end(tasks), name="kopf")
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: _complain(loop, context, stop))
        try:
            yield
        finally:
            # kopf.run_tasks() would wait 5 s for every task of the process and then cancel all of them.
            stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.wait([*tasks, self.ended], timeout=END_SECONDS)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        session = kopf_session.KopfSession(self._client.access, self._begin, self._begun)

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            return session.login()

        @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
        async def on_event(type: str | None, event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
            if type == "DELETED":
                self._follower.on_deleted(body["metadata"]["uid"])
                return
            self._follower.on_job(dict(body))
            strip(event["object"])  # type: ignore[arg-type] # kopf's type knows no other fields

        return registry

    async def _begin(self, namespace: str | None) -> str:
        """Return the resourceVersion at which a watch of the namespace begins.

        Each list of jobs is used for one watch. If there is no unused list, this method lists the jobs first.
        """
        await self._followed.wait()
        follower = self._follower
        if namespace not in follower.versions:
            await follower.ready(namespace)
            listed = await list_jobs_once_allowed(self._client, namespace, follower.on_job)
            follower.on_listed(namespace, listed.uids)
            follower.versions[namespace] = listed.version
        return follower.versions[namespace]

    def _begun(self, namespace: str | None) -> None:
        self._follower.versions.pop(namespace, None)


async def _first_end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until the first of the given tasks ends, and raise its error if it failed."""
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        if not task.cancelled():
            task.result()


def strip(obj: Raw) -> None:
    """Remove all fields from an object that do not identify it.

    kopf keeps the object until the job's next event. With all fields, a thousand jobs with ten replicas took 65 MiB,
    and a job can have any number of labels.
    """
    metadata = obj["metadata"]
    for field in obj.keys() - {"apiVersion", "kind", "metadata"}:
        del obj[field]
    for field in metadata.keys() - KEPT_OF_METADATA:
        del metadata[field]


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any], stop: asyncio.Event) -> None:
    """Handle an error of the event loop as asyncio does, but ignore errors of requests that kopf abandons.

    If kopf is stopped while it looks for the CRD, it abandons requests.
    """
    if not (stop.is_set() and "never retrieved" in context["message"]):
        loop.default_exception_handler(context)


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.networking.error_backoffs = Backoffs()
    # the session has its own timeouts, which exclude the time for which a request waits
    settings.networking.request_timeout = None
    # kopf makes no list: the session starts each watch at a list of this operator
    settings.watching.initial_streaming = True
    settings.watching.inactivity_timeout = math.inf
    settings.watching.server_timeout = 300
    settings.watching.reconnect_backoff = 0.05
    settings.queueing.exit_timeout = 0.5
    settings.queueing.idle_timeout = WORKER_SECONDS
    for logger in ("kopf", "kopf.objects"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    return settings
