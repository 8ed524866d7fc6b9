"""Check of an installation for `helm test`: an operator is the leader, and TrainingJobs can be listed.

The check runs with exactly the operator's permissions, so it fails if one of the permissions that it needs is missing.
"""

from __future__ import annotations

import asyncio
import os
import sys

from concertina.controller.settings import OperatorSettings, OperatorSettingsError, from_environment
from concertina.kube.access import NoAccess
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, NotFound
from concertina.kube.resources import LEASES, TRAINING_JOBS
from concertina.kube.watch.lease import RENEW_SECONDS
from concertina.kube.watch.service_account import operator_access

LIMIT_SECONDS = 60.0
"""Seconds within which the leader must renew its Lease."""


async def check(settings: OperatorSettings, client: Client) -> list[str]:
    """Check the installation, and return a sentence for each part that works.

    Raises:
        TimeoutError: When no operator renews the Lease in time.
        ApiError: When a request is refused, or the API server does not serve TrainingJobs.
    """
    async with asyncio.timeout(LIMIT_SECONDS):
        leader = await _leader(settings, client)
    working = [f"{leader} leads: it renews the Lease {settings.namespace}/{settings.lease}"]
    for namespace in settings.watch_namespaces or (None,):
        async for _ in client.pages(TRAINING_JOBS, namespace, chunk=1):
            break
        working.append(f"TrainingJobs can be listed in {namespace or 'all namespaces'}")
    return working


async def _leader(settings: OperatorSettings, client: Client) -> str:
    """Wait until an operator renews the Lease, and return the operator's identity."""
    first = None
    while True:
        try:
            spec = (await client.get(LEASES, settings.namespace, settings.lease))["spec"]
        except NotFound:
            spec = {}
        seen = (spec.get("holderIdentity"), spec.get("renewTime"))
        if seen[0]:
            if first is not None and seen != first:
                return str(seen[0])
            first = seen
        await asyncio.sleep(RENEW_SECONDS / 2)


async def _main() -> None:
    settings = from_environment()
    async with Client(await operator_access(), give_up_after=LIMIT_SECONDS) as client:
        for sentence in await check(settings, client):
            print(sentence)


def main() -> None:
    """Print the parts that work. If a part does not work, print an error message and exit with status 1."""
    try:
        asyncio.run(_main())
    except TimeoutError:
        sys.exit(f"no operator has renewed the Lease {os.environ.get('CONCERTINA_LEASE')} for {LIMIT_SECONDS:.0f} s")
    except (OperatorSettingsError, NoAccess, ApiError) as error:
        sys.exit(f"the check of the installation failed: {error}")


if __name__ == "__main__":
    main()
