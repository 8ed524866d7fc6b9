"""Master keys of the operator, stored in a Secret. The certificates of all agents derive from a master key.

The operator creates the Secret if it does not exist, reads it when the operator becomes the leader, and restores it if
it is deleted. Each job keeps the master key with which it was started; `status.masterKey` contains the key's id. New
jobs use the key in the Secret's entry `key`.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from concertina.agents.authority import MASTER_KEY_BYTES
from concertina.controller.settings import OperatorSettings
from concertina.kube.client import Client, once_reachable
from concertina.kube.errors import ApiError, Conflict, NotFound
from concertina.kube.resources import SECRETS, Raw
from concertina_protocol.log import log_event

log = logging.getLogger(__name__)
ACTIVE = "key"
OLDER = "key-"
"""Prefix of the names of the Secret's entries with older keys.

Only jobs that were started with such a key use the key.
"""
CHECK_SECONDS = 10.0
# No app.kubernetes.io/instance: Argo CD would take the Secret for a part of its application and delete it.
LABELS = {"app.kubernetes.io/name": "concertina-operator", "app.kubernetes.io/managed-by": "concertina-operator"}


class MasterKeyError(Exception):
    """Error: there is no usable master key. The message gives the reason."""


@dataclass(frozen=True)
class MasterKeys:
    """The operator's active master key, and older keys with which running jobs were started."""

    data: Mapping[str, str]
    """Field `data` of the Secret: the keys in base64, by name of the entry."""
    by_id: Mapping[str, bytes]
    """Keys by id, the active one first."""

    def of(self, id: str) -> bytes | None:
        """Return the master key with the given id, or None if the key is unknown.

        An empty id means the active key, because a job has no key id in its status before it has pods.
        """
        return self.by_id.get(id or next(iter(self.by_id)))


def parse(data: Mapping[str, str]) -> MasterKeys:
    """Return the master keys from the `data` of the Secret.

    Raises:
        MasterKeyError: When the active key is missing, or a key is too short.
    """
    if ACTIVE not in data:
        raise MasterKeyError(f"has no entry {ACTIVE!r}")
    by_id = {}
    for name in (ACTIVE, *(name for name in sorted(data) if name.startswith(OLDER))):
        key = base64.b64decode(data[name]).strip()
        if len(key) < MASTER_KEY_BYTES:
            raise MasterKeyError(
                f"has an entry {name!r} of {len(key)} bytes, and a key needs at least {MASTER_KEY_BYTES}"
            )
        by_id[key_id(key)] = key
    return MasterKeys(data, by_id)


def key_id(key: bytes) -> str:
    """Return the id of a master key.

    The id depends only on the key itself, and not on the name of the Secret's entry (decision "The status records an id
    of the master key").
    """
    return HKDF(hashes.SHA256(), length=4, salt=None, info=b"concertina/key-id").derive(key).hex()


async def read(client: Client, settings: OperatorSettings) -> MasterKeys:
    """Return the master keys. If the Secret does not exist and the settings allow this, create the Secret.

    If several operators try to create the Secret at the same time, the API server accepts only the first, and all
    operators use the keys in that Secret. This coroutine waits until the API server is reachable.

    Raises:
        MasterKeyError: When the Secret cannot be read or created, or has no usable key.
    """
    namespace, name = settings.namespace, settings.master_key_secret
    try:
        try:
            manifest = await once_reachable("the master key", lambda: client.get(SECRETS, namespace, name))
        except NotFound:
            if not settings.makes_master_key:
                raise
            # text without whitespace, because whitespace around a key is stripped
            fresh = secrets.token_urlsafe(48).encode()
            data = {ACTIVE: base64.b64encode(fresh).decode()}
            manifest = await once_reachable("the master key", lambda: _make(client, settings, data))
        return parse(manifest.get("data") or {})
    except (ApiError, MasterKeyError) as error:
        raise MasterKeyError(f"the Secret {namespace}/{name} with the master key: {error}") from error


async def keep(client: Client, settings: OperatorSettings, keys: MasterKeys) -> None:
    """Check periodically whether the Secret with the master keys exists, and restore the Secret if it was deleted.

    Without the Secret, the next operator would create a new key and could not connect to the agents of any running job
    (decision "The operator makes its master key").
    """
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        try:
            try:
                await client.get(SECRETS, settings.namespace, settings.master_key_secret)
            except NotFound:
                await _make(client, settings, keys.data)
                log_event("master key restored", secret=f"{settings.namespace}/{settings.master_key_secret}")
        except ApiError as error:
            log.warning("the Secret %s can't be read: %s", settings.master_key_secret, error)


async def _make(client: Client, settings: OperatorSettings, data: Mapping[str, str]) -> Raw:
    """Create the Secret with the master keys and return it.

    If another operator has created the Secret at the same time, return that Secret.
    """
    metadata = {"name": settings.master_key_secret, "labels": LABELS}
    body = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
    try:
        return await client.create(SECRETS, settings.namespace, body)
    except Conflict:
        return await client.get(SECRETS, settings.namespace, settings.master_key_secret)
