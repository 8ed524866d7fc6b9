"""TrainingJobs through kopf: events only. kopf writes nothing into the user's object and holds none of our state."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import kopf
from kopf._cogs.clients import api as kopf_client

from concertina import backoff
from concertina.api import GROUP, PLURAL, VERSION
from concertina.kube import deep_json
from concertina.kube.access import Access
from concertina.kube.client import Client, once_reachable
from concertina.kube.errors import NotFound
from concertina.kube.resources import TRAINING_JOBS, Raw

log = logging.getLogger(__name__)
RELIST_SECONDS = 10.0
"""From the beginning of one of kopf's lists to its end, at the very most."""


class Backoffs:
    """Seconds between tries, without end: an outage of the API server is waited out in process."""

    def __iter__(self) -> Iterator[float]:
        return (backoff.seconds(failures, 0.2, 1.0) for failures in itertools.count())


async def list_jobs(client: Client, namespaces: Sequence[str]) -> list[Raw]:
    """All TrainingJobs that this operator serves. Waits until the API server can be reached and knows them."""
    warned = False
    while True:
        try:
            jobs: list[Raw] = []
            for namespace in namespaces or (None,):
                listing = functools.partial(client.list_all, TRAINING_JOBS, namespace)
                jobs += (await once_reachable("the list of TrainingJobs", listing))[0]
            return jobs
        except NotFound:
            if not warned:
                log.warning("TrainingJobs are not known to the API server: install the chart's CRD; waiting for it")
            warned = True
            await asyncio.sleep(1.0)


async def run(
    access: Access,
    identity: str,
    namespaces: Sequence[str],
    on_job: Callable[[Raw], None],
    on_deleted: Callable[[str], None],
    on_listed: Callable[[set[str]], None],
    stop: asyncio.Event,
    started: Callable[[], None],
) -> None:
    """Until `stop` is set: `on_job` gets each TrainingJob that is new or has changed, `on_deleted` the uid of one that
    is gone, and `on_listed` the uids of all jobs after kopf has listed them again, as it tells of no deletion that it
    missed. `started` is called once kopf has set itself up: it has taken over the handling of signals by then, which
    the caller may want back."""
    _decode_what_is_nested_deeply()
    others = asyncio.all_tasks()
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await _connection(access)

    named: set[str] = set()
    """Jobs that kopf has named since it began its latest list; None of `listed`: it is not listing."""
    listed: asyncio.TimerHandle | None = None

    def end_of_list() -> None:
        nonlocal listed
        listed = None
        on_listed(named)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def on_event(type: str | None, body: kopf.Body, **_: Any) -> None:
        nonlocal listed
        uid = body["metadata"]["uid"]
        if type == "DELETED":
            on_deleted(uid)
            return
        if type is None and listed is None:  # the first of a list
            named.clear()
            listed = asyncio.get_running_loop().call_later(RELIST_SECONDS, end_of_list)
        named.add(uid)
        on_job(dict(body))

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


def _decode_what_is_nested_deeply() -> None:
    """kopf has no setting for how it decodes: with the standard library's limits, one tenant's manifest ended the watch
    of all. Its watches call json.loads, its lists ClientResponse.json."""
    setattr(kopf_client, "json", types.SimpleNamespace(loads=deep_json.shallow_loads))  # noqa: B010
    defaults = aiohttp.ClientResponse.json.__kwdefaults__
    assert defaults is not None
    defaults["loads"] = deep_json.shallow_loads


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any], stop: asyncio.Event) -> None:
    """As asyncio does, but for requests that kopf abandons when it is told to stop while it looks for the CRD."""
    if not (stop.is_set() and "never retrieved" in context["message"]):
        loop.default_exception_handler(context)


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.networking.error_backoffs = Backoffs()
    settings.networking.request_timeout = 15
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.watching.reconnect_backoff = 0.05
    settings.queueing.exit_timeout = 0.5
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
    )
