"""Going back in durable storage: `LATEST` names the newest checkpoint that was not undone, and says what was, as an
undone one may be published late (decision "LATEST says what was undone")."""

from __future__ import annotations

import contextlib
import zlib
from functools import reduce

from concertina_protocol import Durable, Undone
from concertina_protocol.messages.undone import joined
from concertina_state.checkpoints.latest import Latest, change_latest, read_all_of_latest
from concertina_state.checkpoints.manifest import NAME, parse
from concertina_state.checkpoints.retention import found
from concertina_state.errors import BadInput
from concertina_state.objects.prefix import ObjectPrefix


def undo(folder: ObjectPrefix, uid: str, undone: Undone) -> Durable | None:
    """From now on `LATEST` names nothing of this job that was undone, and takes nothing of it. Returns what it names.
    Again does no harm; a `LATEST` of a later round is past it. Raises StorageError."""

    def without(latest: Latest | None) -> Latest | None:
        before = latest.undid(uid) if latest else ()
        void = joined(before, undone)
        named = latest.durable if latest else None
        if void == before or (named and named.uid == uid and named.round > undone.round):
            return None
        if latest and named and not (named.uid == uid and undone.covers(named.round, named.step)):
            return Latest(named, latest.manifest, latest.crc32, void, uid)
        return newest(folder, uid, void) or Latest(None, "", 0, void, uid)

    now = change_latest(folder, without)
    return now.durable if now else None


def go_back(uri: str, uid: str, *undone: Undone) -> Durable | None:
    """The newest checkpoint of this job that was not undone, now or before; None where none is left. Raises
    StorageError."""
    folder = ObjectPrefix(uri)
    latest = read_all_of_latest(folder)
    good = newest(folder, uid, reduce(joined, undone, latest.undid(uid) if latest else ()))
    return good.durable if good else None


def newest(folder: ObjectPrefix, uid: str, undone: tuple[Undone, ...]) -> Latest | None:
    """As `LATEST` would name it."""
    _, finished = found(folder.entries(uid))
    good = [place for place in finished if not any(some.covers(place.round, place.step) for some in undone)]
    for place in sorted(good, key=lambda place: (place.round, place.step), reverse=True):
        key = f"{place.folder}/{NAME}"
        text = folder.get(key)
        if text is None:  # it was deleted just now
            continue
        uri = f"{folder.uri}/{place.folder}"
        with contextlib.suppress(BadInput):  # damaged, or of a newer version: there are older ones
            manifest = parse(text, uri)
            durable = Durable(uid, place.round, place.step, uri, manifest.complete, manifest.at)
            return Latest(durable, key, zlib.crc32(text), undone, uid)
    return None
