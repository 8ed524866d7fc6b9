"""Ancestors of a state: earlier checkpoints, made by the rounds that led to the state.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from concertina_protocol import SnapshotId
from concertina_state.checkpoints import manifest as manifests
from concertina_state.checkpoints.latest import Latest
from concertina_state.checkpoints.manifest import NAME, CheckpointKey, StoredSidecar
from concertina_state.checkpoints.retention import found
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Continued
from concertina_state.lineage import Lineage, Origin, ParentCheckpoint, canonical_digest, went_through
from concertina_state.objects.prefix import IMPATIENCE, ObjectPrefix, StorageError


def ancestors(keys: Iterable[CheckpointKey], uid: str, id: SnapshotId, origin: Origin | Lineage) -> list[CheckpointKey]:
    """Return the checkpoints among `keys` from which the state `id` was trained, oldest first."""
    own_keys = [key for key in keys if key.uid == uid and key.step < id.step]
    on_the_way = [key for key in own_keys if went_through(origin.rounds, key.round, key.step)]
    return sorted(on_the_way, key=lambda key: (key.step, key.round))


def parent_of(
    folder: ObjectPrefix,
    uid: str,
    id: SnapshotId,
    origin: Origin,
    continued: Continued | None,
    latest: Latest | None,
) -> ParentCheckpoint | None:
    """Return the newest existing checkpoint that led to the state `id`, or None if there is none.

    The object LATEST in storage usually names this checkpoint. But LATEST can also name a checkpoint that did not lead
    to the state, because another round wrote it (decision "The parent of a checkpoint").

    Raises:
        StorageError: When durable storage can't be read.
    """
    durable = latest.durable if latest else None
    named_keys = [CheckpointKey.named_by(durable)] if durable else []
    keys = ancestors(named_keys, uid, id, origin) or ancestors(found(folder.entries(uid))[1], uid, id, origin)
    for key in reversed(keys):
        if text := folder.get(f"{key.folder}/{NAME}"):
            return _parent(f"{folder.uri}/{key.folder}", key, text)
    if continued is None:
        return None
    key, text = CheckpointKey.named_by(continued), None
    with contextlib.suppress(StorageError):  # it may be in another store, and saves must not depend on that store
        text = ObjectPrefix(origin.begun_from, IMPATIENCE).get(NAME) if origin.begun_from else None
    return _parent(origin.begun_from, key, text)


def _parent(uri: str, key: CheckpointKey, text: bytes | None) -> ParentCheckpoint:
    if text is None:
        return ParentCheckpoint(uri, key.uid, key.round, key.step)
    position = 0
    with contextlib.suppress(InvalidInput):
        position = manifests.parse(text, uri).position
    return ParentCheckpoint(uri, key.uid, key.round, key.step, position, hashlib.sha256(text).hexdigest())


def lineage_of(sidecars: Iterable[StoredSidecar], parent: ParentCheckpoint | None, spec: Mapping[str, Any]) -> Lineage:
    """Return the lineage of a checkpoint: the rounds, data and settings that led to it.

    `sidecars` contains the sidecar of each shard, beginning with rank 0. Facts that are the same on all ranks come from
    the sidecar of rank 0.
    """
    facts = [shard_facts.facts for shard_facts in sidecars]
    origin = facts[0].origin
    return Lineage(
        spec=spec,
        spec_digest=canonical_digest(spec) if spec else "",
        parent=parent,
        begun_from=origin.begun_from,
        rounds=origin.rounds,
        data_sets=origin.data_sets,
        images=origin.images,
        devices=tuple(sorted({shard_facts.origin.device for shard_facts in facts} - {""})),
        script=origin.script,
    )
