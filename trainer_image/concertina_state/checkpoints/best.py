"""Best checkpoint of a run's folder: the one with the lowest evaluation loss.

A manifest records the loss that was measured after the checkpoint's own step. With `checkpoint.keepBest`, the object
`LATEST` names both the newest and the best checkpoint. Both names change in the same write.

Losses can be compared only if they were measured on the same sequences of the same documents. If the sequences or
documents of two checkpoints differ, the newer checkpoint counts as better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Optional

from concertina_protocol import BestCheckpoint, Undone
from concertina_state.checkpoints import manifest as manifests
from concertina_state.checkpoints.latest import LATEST, Latest, read_all_of_latest
from concertina_state.checkpoints.manifest import NAME, CheckpointKey, Manifest
from concertina_state.checkpoints.retention import found
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix

BEST = "BEST"
"""Last part of a URI RUN/BEST, which means the best checkpoint of a run's folder."""
IsVoid = Callable[[str, int, int], Optional[Undone]]


def better(best: BestCheckpoint | None, newer: BestCheckpoint | None) -> BestCheckpoint | None:
    """Return the checkpoint with the lower loss, or the older checkpoint if the losses are equal."""
    if best is None or newer is None:
        return newer or best
    return newer if newer.of != best.of or newer.loss < best.loss else best


def measured(manifest: Manifest) -> BestCheckpoint | None:
    """Return a checkpoint with its evaluation loss, or None if it has no finite evaluation loss."""
    result = manifest.evaluation
    if result is None or result.loss is None:
        return None
    return BestCheckpoint(manifest.uid, manifest.id.round, manifest.id.step, result.loss, result.of)


def best_of(whole: Iterable[Manifest]) -> BestCheckpoint | None:
    """Return the best of some checkpoints, given their manifests, oldest first."""
    best = None
    for manifest in whole:
        best = better(best, measured(manifest))
    return best


def best_in(folder: ObjectPrefix, is_void: IsVoid) -> BestCheckpoint | None:
    """Read all manifests of a run's folder, and return the best checkpoint that no rollback has undone.

    Raises:
        StorageError: When durable storage can't be read.
    """
    keys = [key for key in found(folder.entries())[1] if not is_void(key.uid, key.round, key.step)]
    whole = []
    for key, text in zip(keys, folder.get_many([f"{key.folder}/{NAME}" for key in keys])):
        try:
            whole += [manifests.parse(text, f"{folder.uri}/{key.folder}")] if text is not None else []
        except InvalidInput:  # a damaged manifest has no loss
            continue
    return best_of(sorted(whole, key=lambda manifest: (manifest.at, manifest.id.round, manifest.id.step)))


def run_of_best(uri: str) -> ObjectPrefix | None:
    """Return the run's folder if `uri` means the run's best checkpoint, or None if `uri` is an ordinary folder.

    A folder with files of weights may also have the name BEST.

    Raises:
        StorageError: When durable storage can't be read.
    """
    parent, _, name = uri.rstrip("/").rpartition("/")
    if name != BEST:
        return None
    run = ObjectPrefix(parent)
    return run if run.get(LATEST) is not None else None


def best_uri(folder: ObjectPrefix) -> str:
    """Return the URI of the best checkpoint of a run's folder.

    Raises:
        InvalidInput: When no checkpoint there has an evaluation loss.
        StorageError: When durable storage can't be read.
    """
    latest = read_all_of_latest(folder)
    best = latest.durable.best if latest and latest.durable else None
    best = best or best_in(folder, latest.voids if latest else _never)
    if best is None:
        raise InvalidInput(
            f"{folder.uri} has no checkpoint of a step that was evaluated: set trainer.evaluation and "
            "checkpoint.keepBest, or name a checkpoint."
        )
    return f"{folder.uri}/{CheckpointKey.named_by(best).folder}"


def _never(uid: str, round: int, step: int) -> Undone | None:
    return None


def still_best(latest: Latest, folder: ObjectPrefix) -> BestCheckpoint | None:
    """Return the best checkpoint that `latest` names, or the best remaining one if a rollback has undone it.

    Raises:
        StorageError: When durable storage can't be read.
    """
    best = latest.durable.best if latest.durable else None
    if best is None or not latest.voids(best.uid, best.round, best.step):
        return best
    return best_in(folder, latest.voids)
