"""The operator's master keys: a Secret that it makes where there is none, reads when it starts to act, and keeps.

A job is served with the key that it was started with, whose id is in its status; a new one takes the entry `key`.
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
"""How entries begin that are for the jobs started with them, and for no others."""
CHECK_SECONDS = 10.0
# No app.kubernetes.io/instance: Argo CD takes what has it for a part of its application, and prunes it.
LABELS = {"app.kubernetes.io/name": "concertina-operator", "app.kubernetes.io/managed-by": "concertina-operator"}


class MasterKeyError(Exception):
    """There is no master key to go on with; a sentence."""


@dataclass(frozen=True)
class MasterKeys:
    data: Mapping[str, str]
    """Of the Secret, base64."""
    by_id: Mapping[str, bytes]
    """The active one first."""

    def of(self, id: str) -> bytes | None:
        """The key of a job by the id in its status; without one (no pods so far) the active."""
        return self.by_id.get(id or next(iter(self.by_id)))


def parse(data: Mapping[str, str]) -> MasterKeys:
    """`data` of the Secret."""
    if ACTIVE not in data:
        raise MasterKeyError(f"has no entry {ACTIVE!r}")
    by_id = {}
    for name in (ACTIVE, *(name for name in sorted(data) if name.startswith(OLDER))):
        key = base64.b64decode(data[name]).strip()
        if len(key) < MASTER_KEY_BYTES:
            raise MasterKeyError(f"has {len(key)} bytes in its entry {name!r}; {MASTER_KEY_BYTES} or more are needed")
        by_id[key_id(key)] = key
    return MasterKeys(data, by_id)


def key_id(key: bytes) -> str:
    """From the key itself, so that no name of an entry, and no person, has to say which is which (decision "A job names
    its key by what follows from the key")."""
    return HKDF(hashes.SHA256(), length=4, salt=None, info=b"concertina/key-id").derive(key).hex()


async def read(client: Client, settings: OperatorSettings) -> MasterKeys:
    """All operators get the same, also those that find none at the same time: the API server takes one Secret. Waits
    until it can be reached."""
    namespace, name = settings.namespace, settings.master_key_secret
    try:
        try:
            found = await once_reachable("the master key", lambda: client.get(SECRETS, namespace, name))
        except NotFound:
            if not settings.makes_master_key:
                raise
            fresh = secrets.token_urlsafe(48).encode()  # text: whitespace round a key does not count
            data = {ACTIVE: base64.b64encode(fresh).decode()}
            found = await once_reachable("the master key", lambda: _make(client, settings, data))
        return parse(found.get("data") or {})
    except (ApiError, MasterKeyError) as error:
        raise MasterKeyError(f"the Secret {namespace}/{name} with the master key: {error}") from error


async def keep(client: Client, settings: OperatorSettings, keys: MasterKeys) -> None:
    """Puts the Secret back where it is deleted: the next operator would make another key, and reach no running job
    (decision "The operator makes its master key")."""
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        try:
            try:
                await client.get(SECRETS, settings.namespace, settings.master_key_secret)
            except NotFound:
                await _make(client, settings, keys.data)
                log_event("master key restored", secret=f"{settings.namespace}/{settings.master_key_secret}")
        except ApiError as error:
            log.warning("the Secret %s can't be looked at: %s", settings.master_key_secret, error)


async def _make(client: Client, settings: OperatorSettings, data: Mapping[str, str]) -> Raw:
    """The Secret as it is then; another operator's where that was first."""
    metadata = {"name": settings.master_key_secret, "labels": LABELS}
    body = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
    try:
        return await client.create(SECRETS, settings.namespace, body)
    except Conflict:
        return await client.get(SECRETS, settings.namespace, settings.master_key_secret)
