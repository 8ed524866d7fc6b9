"""TrainingJobs through kopf: events only. kopf writes nothing into the user's object and holds none of our state."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import kopf
from kopf._cogs.clients import api as kopf_client
from kopf._cogs.clients import fetching, scanning

from concertina import backoff, metrics
from concertina.api import GROUP, PLURAL, VERSION
from concertina.kube import deep_json
from concertina.kube.access import Access, NoAccess
from concertina.kube.client import Client, once_reachable
from concertina.kube.errors import Forbidden, Gone, NotFound
from concertina.kube.resources import TRAINING_JOBS, Raw
from concertina.kube.watch.reflector import WatchEnd

log = logging.getLogger(__name__)
_stream, _scan = kopf_client.stream, scanning.scan_resources
UNKNOWN_SECONDS = 1.0
"""Until the API server is asked again whether it knows TrainingJobs."""
WORKER_SECONDS = 3600.0
"""For which kopf keeps a job's worker that has nothing to do. To begin one costs its watch a turn of the event loop:
with a thousand jobs it fell behind, was ended by the API server, and told of deletions a minute late."""


KEPT_OF_METADATA = {"name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"}
"""By kopf, of an object that has been handled."""


class Backoffs:
    """Seconds between tries, without end: an outage of the API server is waited out in process."""

    def __iter__(self) -> Iterator[float]:
        return (backoff.seconds(failures, 0.2, 1.0) for failures in itertools.count())


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf copies each object to compare it with what it last handled; nobody here asks what has changed, and the copy
    was a sixth of this operator's work."""

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:
        return {}

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def check(access: Access) -> None:
    """Raises NoAccess where kopf would never connect, while all other requests are answered."""
    if access.server_name is not None:
        raise NoAccess(
            f"The kubeconfig's tls-server-name ({access.server_name}) can't be used by the operator: kopf, which "
            "watches TrainingJobs for it, knows the API server by its address alone. Give it a `server` whose name "
            "is in the API server's certificate, or run the operator in the cluster."
        )


@dataclass(frozen=True)
class Listed:
    """The uids that a list named, and its resourceVersion."""

    uids: set[str]
    version: str


async def list_jobs(client: Client, namespace: str | None, on_job: Callable[[Raw], None]) -> Listed:
    """Hand each TrainingJob of a namespace (None: of all) to `on_job`, one page after the other: decoded, the jobs of
    a cluster can take more memory than the operator has. Waits until the API server can be reached and knows
    TrainingJobs. Raises Forbidden."""
    warned = False
    while True:
        try:
            listing = functools.partial(_list, client, namespace, on_job)
            return await once_reachable("the list of TrainingJobs", listing)
        except Gone:
            log.info("the list of TrainingJobs took longer than the API server keeps it, and begins again")
        except NotFound:
            if not warned:
                log.warning("TrainingJobs are not known to the API server: install the chart's CRD; waiting for it")
            warned = True
            await asyncio.sleep(UNKNOWN_SECONDS)


async def list_jobs_once_allowed(client: Client, namespace: str | None, on_job: Callable[[Raw], None]) -> Listed:
    """List jobs as list_jobs does, but wait until they may be listed."""
    warned = False
    while True:
        try:
            return await list_jobs(client, namespace, on_job)
        except Forbidden as error:
            if not warned:
                what = "no job is" if namespace is None else f"namespace {namespace} is not"
                log.warning("%s served until its TrainingJobs may be listed: %s", what, error)
            warned = True
            await asyncio.sleep(UNKNOWN_SECONDS)


async def _list(client: Client, namespace: str | None, on_job: Callable[[Raw], None]) -> Listed:
    uids, version = set[str](), ""
    async for page, version_of_list in client.pages(TRAINING_JOBS, namespace):
        version = version_of_list
        for obj in page:
            uids.add(obj["metadata"]["uid"])
            on_job(obj)
    return Listed(uids, version)


async def run(
    client: Client,
    identity: str,
    namespaces: Sequence[str],
    versions: dict[str | None, str],
    ready: Callable[[str | None], Awaitable[object]],
    on_job: Callable[[Raw], None],
    on_deleted: Callable[[str], None],
    on_listed: Callable[[str | None, set[str]], None],
    stop: asyncio.Event,
    started: Callable[[], None],
) -> None:
    """Until `stop` is set: `on_job` gets each TrainingJob that is new or has changed, `on_deleted` the uid of one that
    is gone, and `on_listed` the uids of all jobs of a namespace (None: of all) each time that they have been listed, as
    kopf tells of no deletion that it missed. `versions`: of lists that the caller has just made, by namespace, from
    which the first watch goes on. Another namespace is listed as soon as `ready` of it returns. `started` is called
    once kopf has set itself up: it has taken over the handling of signals by then, which the caller may want back."""
    # kopf has no setting for how it decodes: with the standard library's limits, one tenant's manifest ends the watch.
    setattr(kopf_client, "json", types.SimpleNamespace(loads=deep_json.shallow_loads))  # noqa: B010
    _count_watches()
    setattr(scanning, "scan_resources", _scan_until_known)  # noqa: B010
    listing = functools.partial(_listing, client, versions, ready, on_job, on_listed)
    setattr(fetching, "fetch_objs", listing)  # noqa: B010
    others = asyncio.all_tasks()
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await _connection(client.access)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def on_event(type: str | None, event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        if type == "DELETED":
            on_deleted(body["metadata"]["uid"])
            return
        on_job(dict(body))
        strip(event["object"])  # type: ignore[arg-type] # kopf's type knows no other fields

    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=_settings(),
        identity=identity,  # type: ignore[arg-type] # kopf's own guess asks for the user's name, and pods' have none
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
    )
    started()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: _complain(loop, context, stop))
    await kopf.run_tasks(tasks, ignored=others)


def strip(obj: Raw) -> None:
    """Leave what identifies the object. kopf's worker holds it until the job's next event: with all that it had, a
    thousand jobs of ten replicas took 65 MiB, and nobody bounds the number of its labels."""
    metadata = obj["metadata"]
    for field in obj.keys() - {"apiVersion", "kind", "metadata"}:
        del obj[field]
    for field in metadata.keys() - KEPT_OF_METADATA:
        del metadata[field]


def _count_watches() -> None:
    """kopf tells nobody of a watch that ended, and watches nothing but TrainingJobs here."""
    metrics.begin_at_zero(metrics.WATCH_RESTARTS, [PLURAL], WatchEnd)
    setattr(kopf_client, "stream", _counted)  # noqa: B010


async def _counted(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    end = WatchEnd.CLOSED
    try:
        async for event in _stream(*args, **kwargs):
            if event["type"] == "ERROR":
                end = WatchEnd.GONE
            yield event
    except Exception:
        end = WatchEnd.BROKEN
        raise
    finally:
        metrics.WATCH_RESTARTS.labels(PLURAL, end).inc()


async def _scan_until_known(**kwargs: Any) -> Collection[Any]:
    """kopf looks once what the API server knows, and would run on without TrainingJobs: they are listed a moment before
    they are named there, and behind a load balancer another API server may be asked that does not know them yet."""
    warned = False
    while True:
        known = await _scan(**kwargs)
        if any((found.group, found.version, found.plural) == (GROUP, VERSION, PLURAL) for found in known):
            return known
        if not warned:
            log.warning("the API server does not name TrainingJobs among its resources yet; asked again until it does")
        warned = True
        await asyncio.sleep(UNKNOWN_SECONDS)


async def _listing(
    client: Client,
    versions: dict[str | None, str],
    ready: Callable[[str | None], Awaitable[object]],
    on_job: Callable[[Raw], None],
    on_listed: Callable[[str | None, set[str]], None],
    *,
    namespace: str | None,
    **_: Any,
) -> AsyncIterator[tuple[Collection[Raw], str]]:
    """Replace kopf's own list, which reads 500 objects at a time, whatever their size. kopf hears of no object of
    it: it would begin a worker for each, and its handlers hear neither that nothing is listed nor of a list's end."""
    version = versions.pop(namespace, "")
    if not version:
        await ready(namespace)
        listed = await list_jobs_once_allowed(client, namespace, on_job)
        on_listed(namespace, listed.uids)
        version = listed.version
    yield (), version


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any], stop: asyncio.Event) -> None:
    """As asyncio does, but for requests that kopf abandons when it is told to stop while it looks for the CRD."""
    if not (stop.is_set() and "never retrieved" in context["message"]):
        loop.default_exception_handler(context)


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.networking.error_backoffs = Backoffs()
    settings.networking.request_timeout = 15
    settings.watching.server_timeout = 300
    settings.watching.reconnect_backoff = 0.05
    settings.queueing.exit_timeout = 0.5
    settings.queueing.idle_timeout = WORKER_SECONDS
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return settings


async def _connection(access: Access) -> kopf.ConnectionInfo:
    scheme, _, token = (await access.authorization()).partition(" ")
    certificate, key = access.certificate or (None, None)
    return kopf.ConnectionInfo(
        server=access.server,
        ca_path=access.ca_file,
        insecure=not access.verify,
        scheme=scheme or None,
        token=token or None,
        certificate_path=certificate,
        private_key_path=key,
        default_namespace=access.namespace,
        proxy_url=access.proxy,
    )
