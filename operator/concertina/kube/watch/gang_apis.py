"""Discovery of the gang scheduling APIs that the API server serves.

The API server's discovery documents are the only reliable source. A test with a pod would show nothing: if the feature
gate is off, the API server drops a pod's scheduling group without an error.
"""

from __future__ import annotations

from concertina.kube.client import Client
from concertina.kube.errors import NotFound
from concertina.plan.observed import GangApi


async def served_gang_apis(client: Client) -> frozenset[GangApi]:
    """Return the gang scheduling APIs that the API server serves. Without any, the function needs only one request.

    Raises:
        ApiError: When the API server refuses a request or is unreachable.
    """
    versions = await client.api_versions()
    return frozenset([api for api in GangApi if api in versions and await _has_objects(client, api)])


async def _has_objects(client: Client, api: GangApi) -> bool:
    """Return whether the API server serves the kind that gang scheduling needs from this API.

    The API server may serve the API's group and version without this kind.
    """
    try:
        return ("kartas" if api is GangApi.KARTA else "podgroups") in await client.resources_of(api)
    except NotFound:  # the API was removed after the first request
        return False
