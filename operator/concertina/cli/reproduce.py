"""`concertina reproduce`: from a checkpoint in storage to the manifest that trains it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import yaml

from concertina.reproduction import (
    Beginning,
    Irreproducible,
    Reproduction,
    ReproductionOptions,
    lineage_of,
    reproduction,
    without_checkpoint,
)
from concertina_data.opening import open_place, read_manifest
from concertina_data.places import CacheSettings
from concertina_state.checkpoints import catalogue
from concertina_state.checkpoints.ancestry import ancestors
from concertina_state.checkpoints.manifest import NAME, Manifest
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.checkpoints.retention import found
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.trainer import TrainerConfig


def reproduced(uri: str, step: int, wanted: ReproductionOptions) -> Reproduction:
    """Raises InvalidInput, StorageError or Irreproducible."""
    checkpoint = catalogue.at_step(uri, step)
    lineage_of(checkpoint.manifest)
    _check_data(checkpoint.manifest)
    return reproduction(checkpoint.manifest, checkpoint.uri, _beginning(checkpoint), wanted)


def _beginning(checkpoint: StoredCheckpoint) -> Beginning:
    """The newest checkpoint before it that is left of those that it was trained from."""
    manifest, folder = checkpoint.manifest, ObjectPrefix(catalogue.run_of(checkpoint.uri))
    places = found(folder.entries(manifest.uid))[1]
    for place in reversed(ancestors(places, manifest.uid, manifest.id, lineage_of(manifest))):
        if text := folder.get(f"{place.folder}/{NAME}"):
            return Beginning(place.step, f"{folder.uri}/{place.folder}", hashlib.sha256(text).hexdigest())
    beginning = without_checkpoint(manifest)
    if not beginning.uri:
        return beginning
    text = StoredCheckpoint(beginning.uri).folder.get(NAME) or b""
    return Beginning(beginning.step, beginning.uri, hashlib.sha256(text).hexdigest())


def _check_data(manifest: Manifest) -> None:
    """That the bundled trainer's data are those of then. Raises Irreproducible, InvalidInput or StorageError."""
    lineage = lineage_of(manifest)
    if not manifest.trainer:
        return
    try:
        data = TrainerConfig.model_validate(manifest.trainer).data
    except ValueError as error:
        problem = " ".join(str(error).split())[:300]
        raise Irreproducible(f"this version can't read how its trainer was configured ({problem}).") from error
    uris = [source.uri for source in data.sources]
    if len(uris) != len(lineage.data_sets):
        raise Irreproducible(f"it names {len(uris)} data sets, and digests of {len(lineage.data_sets)}")
    cache = CacheSettings(data.cache_bytes)
    now = [read_manifest(open_place(uri, cache)) for uri in uris]
    changed = [
        f"{uri} has digest {found.digest} ({found.documents:,} documents, {found.tokens:,} tokens), and the checkpoint "
        f"was trained on {before}"
        for uri, before, found in zip(uris, lineage.data_sets, now, strict=True)
        if found.digest != before
    ]
    if changed:
        raise Irreproducible(f"{'; '.join(changed)}: put the same data there again, or it would be another training.")


def words(reproduction: Reproduction) -> Sequence[str]:
    """What a person has to know of it."""
    if reproduction.differences:
        first = "The same samples in the same order, and the same curve but for rounding; not to the bit:"
        return [first, *(f"- {each}." for each in (*reproduction.differences, *reproduction.conditions))]
    return ["To the bit, if nothing else differs:", *(f"- {each}." for each in reproduction.conditions)]


def text(reproduction: Reproduction) -> str:
    """The manifest, with what has to be known of it."""
    comments = "".join(f"# {line}\n" for line in words(reproduction))
    return comments + yaml.safe_dump(json.loads(json.dumps(reproduction.manifest)), sort_keys=False)


def variables(options: Sequence[str]) -> Mapping[str, str]:
    """Of NAME=VALUE each. Raises InvalidInput."""
    wrong = [option for option in options if not option.partition("=")[1] or not option.partition("=")[0]]
    if wrong:
        raise InvalidInput(f"--env {wrong[0]} says no value: write NAME=VALUE.")
    return {name: value for name, _, value in (option.partition("=") for option in options)}
