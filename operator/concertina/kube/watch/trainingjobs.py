"""TrainingJobs through kopf: events only. kopf writes nothing into the user's object and holds none of our state."""

from __future__ import annotations

import asyncio
import logging
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import kopf
from kopf._cogs.clients import api as kopf_client

from concertina.api import GROUP, PLURAL, VERSION
from concertina.kube import deep_json
from concertina.kube.access import Access
from concertina.kube.client import Client
from concertina.kube.errors import NotFound
from concertina.kube.resources import TRAINING_JOBS, Raw

log = logging.getLogger(__name__)
Hear = Callable[[str | None, Raw], None]
"""Called with (ADDED, MODIFIED, DELETED, or None while kopf lists, object)."""


class Backoffs:
    """Seconds between tries, without end: an outage of the API server is waited out in process."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.2, 0.5)
        while True:
            yield random.uniform(0.7, 1.3)


async def list_jobs(client: Client, namespaces: Sequence[str]) -> list[Raw]:
    """All TrainingJobs that this operator serves. Waits until their CustomResourceDefinition is there."""
    warned = False
    while True:
        try:
            jobs: list[Raw] = []
            for namespace in namespaces or (None,):
                jobs += (await client.list_all(TRAINING_JOBS, namespace))[0]
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
    hear: Hear,
    stop: asyncio.Event,
    started: Callable[[], None],
) -> None:
    """Hears every event of TrainingJobs until `stop` is set. `started` is called once kopf has set itself up: it has
    taken over the handling of signals by then, which the caller may want back."""
    _decode_what_is_nested_deeply()
    others = asyncio.all_tasks()
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await _connection(access)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def heard(type: str | None, body: kopf.Body, **_: Any) -> None:
        hear(type, dict(body))

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
