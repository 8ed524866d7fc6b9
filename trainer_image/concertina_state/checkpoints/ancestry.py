"""Which checkpoints a state was trained from: those that its rounds went through."""

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


def ancestors(
    places: Iterable[CheckpointKey], uid: str, id: SnapshotId, origin: Origin | Lineage
) -> list[CheckpointKey]:
    """Those among `places` that the state `id` was trained from, oldest first."""
    mine = [place for place in places if place.uid == uid and place.step < id.step]
    on_the_way = [place for place in mine if went_through(origin.rounds, place.round, place.step)]
    return sorted(on_the_way, key=lambda place: (place.step, place.round))


def parent_of(
    folder: ObjectPrefix,
    uid: str,
    id: SnapshotId,
    origin: Origin,
    continued: Continued | None,
    latest: Latest | None,
) -> ParentCheckpoint | None:
    """The newest checkpoint that is there of those that the state was trained from. Mostly LATEST names it; but it may
    name one of a round that this state was not made from (decision "The parent is on the way"). Raises StorageError."""
    durable = latest.durable if latest else None
    named = [CheckpointKey(durable.uid, durable.round, durable.step)] if durable else []
    places = ancestors(named, uid, id, origin) or ancestors(found(folder.entries(uid))[1], uid, id, origin)
    for place in reversed(places):
        if text := folder.get(f"{place.folder}/{NAME}"):
            return _parent(f"{folder.uri}/{place.folder}", place, text)
    if continued is None:
        return None
    place, text = CheckpointKey(continued.uid, continued.round, continued.step), None
    with contextlib.suppress(StorageError):  # another store, perhaps: what this run saves does not hang on it
        text = ObjectPrefix(origin.begun_from, IMPATIENCE).get(NAME) if origin.begun_from else None
    return _parent(origin.begun_from, place, text)


def _parent(uri: str, place: CheckpointKey, text: bytes | None) -> ParentCheckpoint:
    if text is None:
        return ParentCheckpoint(uri, place.uid, place.round, place.step)
    position = 0
    with contextlib.suppress(InvalidInput):
        position = manifests.parse(text, uri).position
    return ParentCheckpoint(uri, place.uid, place.round, place.step, position, hashlib.sha256(text).hexdigest())


def lineage_of(sidecars: Iterable[StoredSidecar], parent: ParentCheckpoint | None, spec: Mapping[str, Any]) -> Lineage:
    """`sidecars`: of all shards, that of rank 0 first; what is the same on all ranks is taken from it."""
    facts = [each.facts for each in sidecars]
    origin = facts[0].origin
    return Lineage(
        spec=spec,
        spec_digest=canonical_digest(spec) if spec else "",
        parent=parent,
        begun_from=origin.begun_from,
        rounds=origin.rounds,
        data_sets=origin.data_sets,
        images=origin.images,
        devices=tuple(sorted({each.origin.device for each in facts} - {""})),
        script=origin.script,
    )
