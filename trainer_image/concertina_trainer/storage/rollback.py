"""Going back in durable storage: to the newest checkpoint up to a step, which `LATEST` then names."""

from __future__ import annotations

import json
import zlib

from concertina_agent.protocol import Durable
from concertina_agent.typed_json import from_json
from concertina_trainer.errors import BadInput
from concertina_trainer.storage.checkpoint import LATEST, Latest
from concertina_trainer.storage.folder import Changed, Folder
from concertina_trainer.storage.manifest import NAME, Manifest, Place, to_json


def go_back(latest: Durable, step: int, leads: bool) -> Durable:
    """The newest checkpoint of this job up to that step; who leads lets `LATEST` name it. Raises BadInput where none is
    left, or StorageError. Rounds come first: what a lower round wrote may have been undone before."""
    if latest.step <= step:
        return latest
    root, uid, _, _ = latest.uri.rsplit("/", 3)
    folder = Folder(root)
    known = [at for key in folder.list(uid) if (at := Place.of(key))]
    found = [place for place, name in known if name == NAME and place.step <= step]
    if not found:
        raise BadInput(
            f"training has to go back to step {step} or before, and no such checkpoint is left in {root}/{uid}: keep "
            "more of them (checkpoint.keep), or write them more often."
        )
    place = max(found, key=lambda place: (place.round, place.step))
    key = f"{place.folder}/{NAME}"
    text = folder.get(key)
    if text is None:
        raise BadInput(f"{root}/{key} was deleted just now: is something else cleaning up there?")
    manifest = from_json(Manifest, json.loads(text))
    durable = Durable(uid, place.round, place.step, f"{root}/{place.folder}", manifest.complete, manifest.at)
    if leads:
        _point(folder, latest, Latest(durable, key, zlib.crc32(text)))
    return durable


def _point(folder: Folder, expected: Durable, latest: Latest) -> None:
    """Unless LATEST has moved: then a newer world has been here, and knows better."""
    found = folder.get_version(LATEST)
    if found is None:
        return
    seen = from_json(Latest, json.loads(found[0])).durable
    if (seen.uid, seen.round, seen.step) == (expected.uid, expected.round, expected.step):
        try:
            folder.put_if(LATEST, to_json(latest), found[1])
        except Changed:
            return
