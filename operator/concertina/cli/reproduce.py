"""`concertina reproduce`: write the manifest of a job that trains a stored checkpoint again."""

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


def reproduced(uri: str, step: int, options: ReproductionOptions) -> Reproduction:
    """Return the manifest of a job that trains the checkpoint of a step again.

    Raises:
        InvalidInput: When the checkpoint or its data can't be read.
        StorageError: When the storage can't be reached.
        Irreproducible: When the checkpoint can't be reproduced.
    """
    checkpoint = catalogue.at_step(uri, step)
    lineage_of(checkpoint.manifest)
    _check_data(checkpoint.manifest)
    return reproduction(checkpoint.manifest, checkpoint.uri, _find_beginning(checkpoint), options)


def _find_beginning(checkpoint: StoredCheckpoint) -> Beginning:
    """Return the newest state from which training can start to reproduce `checkpoint`.

    This is an earlier checkpoint of the same history. If none exists any more, it is the state from which the job
    began.
    """
    manifest, folder = checkpoint.manifest, ObjectPrefix(catalogue.run_of(checkpoint.uri))
    locations = found(folder.entries(manifest.uid))[1]
    for location in reversed(ancestors(locations, manifest.uid, manifest.id, lineage_of(manifest))):
        if text := folder.get(f"{location.folder}/{NAME}"):
            return Beginning(location.step, f"{folder.uri}/{location.folder}", hashlib.sha256(text).hexdigest())
    beginning = without_checkpoint(manifest)
    if not beginning.uri:
        return beginning
    text = StoredCheckpoint(beginning.uri).folder.get(NAME) or b""
    return Beginning(beginning.step, beginning.uri, hashlib.sha256(text).hexdigest())


def _check_data(manifest: Manifest) -> None:
    """Check that the data sets of the bundled trainer still have the digests that the checkpoint records.

    Raises:
        Irreproducible: When the data have changed, or the trainer's configuration can't be read.
        InvalidInput: When a data set can't be read.
        StorageError: When the storage can't be reached.
    """
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
    data_manifests = [read_manifest(open_place(uri, cache)) for uri in uris]
    changed = [
        f"{uri} has digest {stored.digest} ({stored.documents:,} documents, {stored.tokens:,} tokens), and the "
        f"checkpoint was trained on {digest}"
        for uri, digest, stored in zip(uris, lineage.data_sets, data_manifests, strict=True)
        if stored.digest != digest
    ]
    if changed:
        raise Irreproducible(
            f"{'; '.join(changed)}: restore the same data there, because other data would give another result."
        )


def words(reproduction: Reproduction) -> Sequence[str]:
    """Return sentences on how closely the new job's result will match the checkpoint."""
    if reproduction.differences:
        first = (
            "The samples, their order and the loss curve are the same, except for rounding. The result is "
            "not bit-identical:"
        )
        return [first, *(f"- {sentence}." for sentence in (*reproduction.differences, *reproduction.conditions))]
    return [
        "The result is bit-identical if nothing else differs:",
        *(f"- {sentence}." for sentence in reproduction.conditions),
    ]


def text(reproduction: Reproduction) -> str:
    """Return the manifest as YAML, with comments on how closely the new job's result will match the checkpoint."""
    comments = "".join(f"# {line}\n" for line in words(reproduction))
    return comments + yaml.safe_dump(json.loads(json.dumps(reproduction.manifest)), sort_keys=False)


def variables(options: Sequence[str]) -> Mapping[str, str]:
    """Return the environment variables from options in the form NAME=VALUE.

    Raises:
        InvalidInput: When an option has no name or no value.
    """
    wrong = [option for option in options if not option.partition("=")[1] or not option.partition("=")[0]]
    if wrong:
        raise InvalidInput(f"--env {wrong[0]} says no value: write NAME=VALUE.")
    return {name: value for name, _, value in (option.partition("=") for option in options)}
