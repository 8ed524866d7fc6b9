"""Discovery of the APIs of gang scheduling that the API server serves.

Discovery is the only reliable evidence. With its feature gate off, the API server drops a pod's scheduling group
without an error.
"""

from __future__ import annotations

from concertina.kube.client import Client
from concertina.kube.errors import NotFound
from concertina.plan.observed import GangApi


async def served_gang_apis(client: Client) -> frozenset[GangApi]:
    """Return the APIs of gang scheduling that are served. Without any of their groups, this is one request.

    Raises:
        ApiError: When the API server refuses, or is unreachable.
    """
    versions = await client.api_versions()
    return frozenset([api for api in GangApi if api in versions and await _has_objects(client, api)])


async def _has_objects(client: Client, api: GangApi) -> bool:
    """Return whether the API has the resource that gang scheduling needs; its group may have others only."""
    try:
        return ("kartas" if api is GangApi.KARTA else "podgroups") in await client.resources_of(api)
    except NotFound:  # removed since the first request
        return False
